// Starts the page: the key, the theme, and one of the two views.

import { ApiError, json, key } from "./api.js";
import { el, field, notify } from "./dom.js";
import { LiveView } from "./live/live.js";
import { Playground } from "./playground/playground.js";

const THEME = "lorikeet-theme";
const VIEWS = ["playground", "live"];
const find = (id) => document.getElementById(id);
let capabilities = null;
let live = null;

function showTheme() {
  const chosen = localStorage.getItem(THEME);
  const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const button = find("theme-button");
  button.textContent = isDark ? "☀" : "☾";
  button.setAttribute("aria-label", isDark ? "Use light colours" : "Use dark colours");
}

function askKey(isNeeded) {
  const input = el("input", { type: "password", autocomplete: "off", spellcheck: false, value: key.get() });
  const dialog = el("dialog", { "aria-labelledby": "key-title", onclose: () => dialog.remove() }, el("h2", { id: "key-title" }, "API key"),
    el("p", { class: "dim" }, isNeeded ? "This server needs an API key. " : "", "It is kept until this tab is closed, and sent to this server only."),
    el("form", { onsubmit: (event) => {
      event.preventDefault();
      key.set(input.value.trim());
      location.reload();
    } }, field("Key", input), el("div", { class: "row" },
      el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), el("button", { type: "submit", class: "primary" }, "Use it"))));
  document.body.append(dialog);
  dialog.showModal();
}

function showView() {
  const wanted = VIEWS.find((view) => location.hash === `#${view}`) || "playground";
  for (const view of VIEWS) {
    find(`view-${view}`).hidden = view !== wanted;
    if (view === wanted) find(`tab-${view}`).setAttribute("aria-current", "page");
    else find(`tab-${view}`).removeAttribute("aria-current");
  }
  document.title = wanted === "live" ? "Live · Lorikeet" : "Playground · Lorikeet";
  if (wanted === "live") live?.start();
  else live?.stop();
}

async function start() {
  find("key-button").addEventListener("click", () => askKey(false));
  find("theme-button").addEventListener("click", () => {
    localStorage.setItem(THEME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    showTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  showTheme();
  addEventListener("hashchange", showView);
  try {
    capabilities = await json("v1/capabilities");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      if (key.get()) notify("The server does not accept this key.");
      askKey(true);
    } else notify(`The server does not answer: ${error.message}`);
    return;
  }
  find("model").textContent = capabilities.model;
  find("key-button").textContent = capabilities.key ? `Key: ${capabilities.key}` : "API key";
  live = new LiveView(find("view-live"), capabilities);
  const playground = new Playground(find("view-playground"), capabilities);
  showView();
  await playground.start();
  document.documentElement.dataset.ready = "true";
}

start();

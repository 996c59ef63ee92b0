// Starts the page: the key, the theme, and one of the two views.

import { ApiError, json, key } from "./api.js";
import { Drawer } from "./drawer.js";
import { button, el, field, iconButton, icon, notify, openDialog } from "./dom.js";
import { Playground } from "./playground/playground.js";
import { ServerStatus } from "./status.js";

const THEME = "lorikeet-theme";
const VIEWS = ["playground", "live"];
const find = (id) => document.getElementById(id);
let live = null;
let sidebar = null;

function showTheme() {
  const chosen = localStorage.getItem(THEME);
  const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  const shown = find("theme-button");
  shown?.replaceChildren(icon(isDark ? "sun" : "moon"));
  const label = isDark ? "Use light colours" : "Use dark colours";
  shown?.setAttribute("aria-label", label);
  shown?.setAttribute("title", label);
}

function switchTheme() {
  localStorage.setItem(THEME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  showTheme();
}

// `problem` is why the server asks, if it does.
export function askKey(problem = "") {
  if (document.querySelector("dialog.key-dialog")) return;
  const input = el("input", { type: "password", autocomplete: "off", spellcheck: false, value: key.get() });
  const fault = el("p", { class: "bad-text", role: "alert" }, problem);
  const use = button("Use this key", { class: "primary", onclick: () => form.requestSubmit() });
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    const before = key.get();
    key.set(input.value.trim());
    use.disabled = true;
    try {
      await json("v1/capabilities");
      location.reload();
    } catch (error) {
      key.set(before);
      fault.textContent = error instanceof ApiError && error.status === 401
        ? "The server does not accept this key. Check that all of it was copied, or ask whoever runs the server for another."
        : `The key could not be checked: ${error instanceof ApiError ? error.message : "the server does not answer"}.`;
      input.select();
    }
    use.disabled = false;
  } }, field("Key", input), fault);
  openDialog("API key", [el("p", { class: "dim" }, "It is kept until this tab is closed, and sent to this server only."), form],
    { buttons: [use], close: "Cancel", kind: "key-dialog" });
  input.focus();
}

function showView() {
  const wanted = VIEWS.find((view) => location.hash === `#${view}`) || "playground";
  for (const view of VIEWS) {
    find(`view-${view}`).hidden = view !== wanted;
    if (view === wanted) find(`tab-${view}`).setAttribute("aria-current", "page");
    else find(`tab-${view}`).removeAttribute("aria-current");
  }
  document.title = wanted === "live" ? "Live · Lorikeet" : "Lorikeet";
  sidebar?.close();
  if (wanted === "live") live?.start();
  else live?.stop();
}

// The live view's code is fetched when it is first shown.
class LazyLive {
  constructor(element, capabilities) {
    this.element = element;
    this.capabilities = capabilities;
  }

  async start() {
    this.isWanted = true;
    this.loading ||= import("./live/live.js").then(({ LiveView }) => new LiveView(this.element, this.capabilities, { menu: sidebar.toggle(), askKey }));
    this.view = await this.loading;
    if (this.isWanted) this.view.start();
  }

  stop() {
    this.isWanted = false;
    this.view?.stop();
  }
}

function buildFoot(capabilities) {
  const keyLabel = capabilities?.key ? `API key: ${capabilities.key}` : "API key";
  find("sidebar-foot").replaceChildren(
    button(keyLabel, { class: "quiet small", id: "key-button", onclick: () => askKey() }, "key"), el("span", { class: "grow" }),
    iconButton("keyboard", "Keyboard shortcuts", { id: "help-button", onclick: showHelp }), iconButton("sun", "", { id: "theme-button", onclick: switchTheme }));
  showTheme();
}

async function showHelp() {
  (await import("./help.js")).showHelp();
}

async function start() {
  sidebar = new Drawer(find("sidebar"), "(max-width: 1023px)", "Open menu");
  buildFoot(null);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  addEventListener("hashchange", showView);
  const capabilities = await firstCapabilities();
  if (!capabilities) return;
  buildFoot(capabilities);
  let playground = null;
  const status = new ServerStatus(capabilities, (state) => {
    if (state === "key") askKey("The server does not accept the key any more. Enter another one.");
    playground?.serverChanged(status.capabilities);
  });
  live = new LazyLive(find("view-live"), capabilities);
  playground = new Playground(find("view-playground"), { capabilities, status, sidebar, askKey, conversations: find("conversations") });
  showView();
  await playground.start();
  addEventListener("keydown", (event) => {
    const isWriting = event.target.closest?.("input, textarea, select, dialog");
    if (event.key === "?" && !isWriting) showHelp();
    else if (!event.defaultPrevented) playground.shortcut(event, isWriting);
  });
  document.documentElement.dataset.ready = "true";
}

// Waits until the server answers; null where it needs a key.
async function firstCapabilities() {
  for (let failures = 0; ; failures += 1) {
    try {
      const capabilities = await json("v1/capabilities");
      if (failures) notify("");
      return capabilities;
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        askKey(key.get() ? "The server does not accept this key. Enter another one." : "This server needs an API key. Its operator has one for you.");
        return null;
      }
      notify(error instanceof ApiError ? error.message : "The server does not answer. Check that it runs; this page connects again by itself.");
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

start();

// Small tools for building elements. Text always goes in as text, never as HTML.

export function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list" && key !== "form") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Lines on a square of 24.
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  columns: "M4 5h16v14H4zM12 5v14",
  chevron: "M7 10l5 5 5-5",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 13l4 4 10-11",
  again: "M5 12a7 7 0 1 0 2-5M5 4v4h4",
  tokens: "M4 8h6v8H4zM13 8h3v8h-3zM19 8h1v8h-1z",
  code: "M9 7l-5 5 5 5M15 7l5 5-5 5",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12M10 11v5M14 11v5",
  clip: "M17 9l-6 6a2 2 0 0 1-3-3l7-7a3.5 3.5 0 0 1 5 5l-7 7a5 5 0 0 1-7-7l6-6",
  search: "M11 5a6 6 0 1 0 0 12a6 6 0 1 0 0-12M16 16l4 4",
  chat: "M5 6h14v10h-8l-4 3v-3H5z",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  key: "M14 10a4 4 0 1 0-3.5 4L12 12.5h2v2h2v2h3v-3z",
  sun: "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6l1.4 1.4M17 17l1.4 1.4M18.4 5.6L17 7M7 17l-1.4 1.4",
  moon: "M19 14a7.5 7.5 0 0 1-9-9a7.5 7.5 0 1 0 9 9z",
  keyboard: "M3 7h18v10H3zM7 10.5h.01M11 10.5h.01M15 10.5h.01M8 14h8",
  import: "M12 4v10M8 10l4 4 4-4M5 19h14",
  export: "M12 15V5M8 9l4-4 4 4M5 19h14",
  upload: "M12 15V5M8 9l4-4 4 4M5 14v5h14v-5",
  file: "M7 4h7l4 4v12H7zM14 4v4h4",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

// A button that is only an icon; `label` is its name and its tooltip.
export function iconButton(name, label, properties = {}) {
  return el("button", { type: "button", title: label, "aria-label": label, ...properties, class: `quiet square ${properties.class || ""}`.trim() }, icon(name));
}

export function button(text, properties = {}, name = "") {
  return el("button", { type: "button", ...properties }, name ? icon(name) : null, text);
}

export function field(label, control, hint) {
  control.id ||= `field-${Math.random().toString(36).slice(2)}`;
  const parts = [el("label", { class: "label", htmlFor: control.id }, label), control];
  if (hint) {
    const text = el("small", { class: "dim", id: `${control.id}-hint` }, hint);
    control.setAttribute("aria-describedby", text.id);
    parts.push(text);
  }
  return el("div", { class: "field" }, parts);
}

// A modal dialog with a title; `close` is its last button. It leaves the page when it is closed.
export function openDialog(title, content, { buttons = [], close = "Close", kind = "" } = {}) {
  const id = `title-${Math.random().toString(36).slice(2)}`;
  const dialog = el("dialog", { class: kind, "aria-labelledby": id, onclose: () => dialog.remove() }, el("h2", { id }, title), content,
    el("div", { class: "row" }, el("button", { type: "button", onclick: () => dialog.close() }, close), buttons));
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

let noticeTimer = 0;

// Shows a sentence at the top of the page; without one, hides it.
export function notify(text) {
  const notice = document.getElementById("notice");
  clearTimeout(noticeTimer);
  notice.textContent = text || "";
  notice.hidden = !text;
  if (text) noticeTimer = setTimeout(() => notify(""), 12000);
}

// `navigator.clipboard` exists only in secure contexts, and may be denied: then the text is selected and copied as by its reader.
export async function copyText(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = shown || el("textarea", { class: "sr", value: text, readOnly: true });
    if (!shown) {
      document.body.append(area);
      area.select();
    } else getSelection().selectAllChildren(area);
    const isCopied = document.execCommand("copy");
    if (!shown) area.remove();
    return isCopied;
  }
}

// A button that copies what `text` returns, and says so for two seconds.
export function copyButton(label, text, properties = {}) {
  const made = iconButton("copy", label, { ...properties, onclick: async () => {
    const isCopied = await copyText(text());
    made.replaceChildren(icon(isCopied ? "check" : "close"));
    made.setAttribute("aria-label", isCopied ? "Copied" : "The browser does not allow copying");
    setTimeout(() => {
      made.replaceChildren(icon("copy"));
      made.setAttribute("aria-label", label);
    }, 2000);
  } });
  return made;
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

// Milliseconds as people read them: 0.8 ms, 43 ms, 1.24 s, 56.1 s, 2 min 5 s.
export function duration(ms) {
  if (ms < 10) return `${number(ms, 1)} ms`;
  if (ms < 999.5) return `${number(ms)} ms`;
  if (ms < 9995) return `${number(ms / 1000, 2)} s`;
  if (ms < 99950) return `${number(ms / 1000, 1)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

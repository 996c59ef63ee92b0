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
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
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

let noticeTimer = 0;

// Shows a sentence at the top of the page; without one, hides it.
export function notify(text) {
  const notice = document.getElementById("notice");
  clearTimeout(noticeTimer);
  notice.textContent = text || "";
  notice.hidden = !text;
  if (text) noticeTimer = setTimeout(() => notify(""), 12000);
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

// A panel at a side that covers the page on narrow screens, and stands next to it on wide ones.

import { el, iconButton } from "./dom.js";

export class Drawer {
  // `query` says where it covers the page.
  constructor(element, query, label, { symbol = "menu", onClose = () => {} } = {}) {
    this.element = element;
    this.narrow = matchMedia(query);
    this.label = label;
    this.symbol = symbol;
    this.onClose = onClose;
    this.toggles = [];
    this.shade = el("div", { class: "shade", hidden: true, onclick: () => this.close() });
    element.after(this.shade);
    element.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isOpen && this.narrow.matches) {
        event.stopPropagation();
        this.close();
      }
    });
    this.closer = iconButton("close", "Close", { class: "drawer-close", onclick: () => this.close() });
    element.prepend(this.closer);
    this.narrow.addEventListener("change", () => this.#show());
    this.#show();
  }

  // A button that opens it.
  toggle() {
    const made = iconButton(this.symbol, this.label, { class: "drawer-toggle", "aria-expanded": "false", onclick: () => (this.isOpen ? this.close() : this.open(made)) });
    if (this.element.id) made.setAttribute("aria-controls", this.element.id);
    this.toggles.push(made);
    this.#show();
    return made;
  }

  open(opener = null) {
    this.opener = opener;
    this.isOpen = true;
    this.#show();
    if (this.narrow.matches) this.closer.focus();
  }

  close() {
    if (!this.isOpen) return;
    const hadFocus = this.element.contains(document.activeElement);
    this.isOpen = false;
    this.#show();
    if (hadFocus || this.narrow.matches) this.opener?.focus();
    this.onClose();
  }

  #show() {
    const isCovering = this.narrow.matches;
    this.element.classList.toggle("open", Boolean(this.isOpen));
    this.shade.hidden = !(isCovering && this.isOpen);
    for (const toggle of this.toggles) toggle.setAttribute("aria-expanded", String(Boolean(this.isOpen)));
  }
}

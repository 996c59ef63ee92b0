// Named settings of this browser. An adapter is part of a preset; a seed is not.

import { el, field, iconButton, openDialog, button } from "../dom.js";

const KEY = "lorikeet-presets";

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) || {};
  } catch {
    return {};
  }
}

export class Presets {
  // `current` returns the settings that are shown; `take` gets those of a preset.
  constructor(current, take) {
    this.current = current;
    this.select = el("select", { onchange: () => {
      const chosen = read()[this.select.value];
      this.remove.disabled = !chosen;
      if (chosen) take(structuredClone(chosen));
    } });
    this.remove = iconButton("trash", "Delete this preset", { class: "small", disabled: true, onclick: () => {
      const { [this.select.value]: _, ...rest } = read();
      localStorage.setItem(KEY, JSON.stringify(rest));
      this.#list("");
    } });
    const made = field("Preset", this.select);
    this.element = el("div", { class: "preset" }, made, iconButton("plus", "Save these settings as a preset", { class: "small", onclick: () => this.#ask() }), this.remove);
    this.#list("");
  }

  // Nothing is chosen any more: the settings were changed.
  clear() {
    this.select.value = "";
    this.remove.disabled = true;
  }

  #list(chosen) {
    this.select.replaceChildren(el("option", { value: "" }, "None"), ...Object.keys(read()).sort().map((name) => el("option", { value: name }, name)));
    this.select.value = chosen;
    this.remove.disabled = !chosen;
  }

  #ask() {
    const input = el("input", { required: true, maxLength: 60, autocomplete: "off" });
    const form = el("form", { onsubmit: (event) => {
      event.preventDefault();
      const name = input.value.trim();
      if (!name) return;
      const { seed: _, ...kept } = structuredClone(this.current());
      localStorage.setItem(KEY, JSON.stringify({ ...read(), [name]: kept }));
      this.#list(name);
      dialog.close();
    } }, field("Name", input));
    const dialog = openDialog("Save a preset", [el("p", { class: "dim" }, "It is kept in this browser. A preset of the same name is replaced."), form],
      { buttons: [button("Save", { class: "primary", onclick: () => form.requestSubmit() })], close: "Cancel" });
    input.focus();
  }
}

// Chooses an adapter among thousands: a search field, and a list that only builds the rows in view.

import { json } from "../api.js";
import { button, el, number } from "../dom.js";

const ROW = 56;
const TIERS = { device: "on the device", host: "in host memory", disk: "on disk" };

export class Picker {
  constructor(capabilities, onChoose, askKey) {
    this.capabilities = capabilities;
    this.onChoose = onChoose;
    this.askKey = askKey;
    this.all = [];
    this.matching = [];
    this.active = 0;
    this.search = el("input", {
      type: "search", placeholder: "Search by name or description", autocomplete: "off", spellcheck: false, role: "combobox",
      "aria-expanded": "true", "aria-controls": "picker-list", "aria-autocomplete": "list", "aria-label": "Search adapters",
      oninput: () => this.#filter(), onkeydown: (event) => this.#key(event),
    });
    this.space = el("div", { class: "picker-space", role: "presentation" });
    this.list = el("div", {
      class: "picker-list", id: "picker-list", role: "listbox", "aria-label": "Adapters", tabindex: "0",
      onscroll: () => this.#draw(), onkeydown: (event) => this.#key(event),
    }, this.space);
    this.count = el("p", { class: "dim picker-count", role: "status" });
    this.dialog = el("dialog", { class: "picker", "aria-labelledby": "picker-title" },
      el("h2", { id: "picker-title" }, "Choose an adapter"), this.search, this.count, this.list,
      el("div", { class: "row" }, button("Load from files…", { class: "quiet", onclick: () => this.#upload() }, "upload"), el("span", { class: "grow" }),
        button("Cancel", { onclick: () => this.dialog.close() })));
    document.body.append(this.dialog);
  }

  async #upload() {
    this.dialog.close();
    const { offerUpload } = await import("./upload.js");
    offerUpload([], { capabilities: this.capabilities, askKey: this.askKey, onLoaded: (name) => this.onChoose(name, "") });
  }

  async open(current) {
    this.current = current;
    this.search.value = "";
    this.dialog.showModal();
    this.count.textContent = "Loading…";
    try {
      const { data } = await json("v1/models");
      this.all = data.filter((model) => model.parent);
    } catch (error) {
      this.count.textContent = error.message;
      return;
    }
    this.#filter();
    this.search.focus();
  }

  #filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rank = { device: 0, host: 1, disk: 2 };
    const text = (model) => `${model.id} ${model.description || ""}`.toLowerCase();
    this.matching = this.all.filter((model) => words.every((word) => text(model).includes(word)))
      .sort((a, b) => (rank[a.tier] ?? 3) - (rank[b.tier] ?? 3) || (a.id < b.id ? -1 : 1));
    const typed = this.search.value.trim();
    const base = { id: "", name: "No adapter", description: `${this.capabilities.model} alone` };
    const hasBase = words.every((word) => `${base.name} ${base.description}`.toLowerCase().includes(word));
    this.rows = hasBase ? [base, ...this.matching] : this.matching.slice();
    if (typed && !this.all.some((model) => model.id === typed)) {
      this.rows.push({ id: typed, name: `Ask for “${typed}”`, description: "It is not in the list. The server looks for this name where it finds adapters." });
    }
    this.active = Math.max(0, words.length ? 0 : this.rows.findIndex((row) => row.id === (this.current || "")));
    this.count.textContent = this.all.length ? `${number(this.matching.length)} of ${number(this.all.length)} adapters`
      : "The server lists no adapters. Type a name that it can find, or load one from files.";
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.list.style.height = `${Math.max(4, this.all.length + 1) * ROW + 2}px`; // not that of the rows: it stays while one types
    this.#reveal();
  }

  #key(event) {
    const page = Math.floor(this.list.clientHeight / ROW) - 1;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    if (event.key in moves) {
      event.preventDefault();
      this.active = Math.min(this.rows.length - 1, Math.max(0, this.active + moves[event.key]));
      this.#reveal();
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.#choose(this.rows[this.active]);
    }
  }

  #reveal() {
    const top = this.active * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    const bottom = top + ROW - this.list.clientHeight;
    if (bottom > this.list.scrollTop) this.list.scrollTop = bottom;
    this.#draw();
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
    const last = Math.min(this.rows.length, first + Math.ceil(this.list.clientHeight / ROW) + 8);
    const rows = [];
    for (let index = first; index < last; index += 1) rows.push(this.#row(this.rows[index], index));
    this.space.replaceChildren(...rows);
    this.search.setAttribute("aria-activedescendant", `picker-row-${this.active}`);
    this.list.setAttribute("aria-activedescendant", `picker-row-${this.active}`);
  }

  #row(model, index) {
    const tier = model.problem ? el("span", { class: "tag bad" }, "not served")
      : model.parent ? el("span", { class: `tag ${model.tier || ""}` }, TIERS[model.tier] || "not loaded") : null;
    const row = el("div", {
      id: `picker-row-${index}`, role: "option", class: `picker-row${index === this.active ? " active" : ""}`,
      "aria-selected": String(index === this.active), "aria-setsize": this.rows.length, "aria-posinset": index + 1,
      title: model.problem || model.warning || model.description || model.root || "", onclick: () => this.#choose(model),
    }, el("span", { class: "picker-text" }, el("span", { class: "picker-name" }, model.name || model.id),
      el("span", { class: "picker-note dim" }, model.problem || model.warning || model.description || noteOf(model))), tier);
    row.style.top = `${index * ROW}px`;
    return row;
  }

  #choose(model) {
    if (!model || model.problem) return;
    this.dialog.close();
    this.onChoose(model.id, model.root === model.id ? model.adapter_source : ""); // an alias needs no source
  }
}

// What is known of an adapter without a description.
const noteOf = ({ id, root, adapter_source: source }) => (root && root !== id ? `${{ hub: "Hugging Face Hub", local: "folder", s3: "S3" }[source] || source}: ${root}` : "");

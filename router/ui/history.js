// The list of kept conversations.

import { el, notify } from "./dom.js";
import * as store from "./store.js";

export class HistoryPanel {
  constructor(onOpen, onNew, onRemove) {
    this.onOpen = onOpen;
    this.onRemove = onRemove;
    this.list = el("ul", { class: "history-list" });
    this.empty = el("p", { class: "dim" }, "Conversations are kept in this browser only.");
    this.element = el("div", { class: "history" },
      el("button", { type: "button", class: "primary wide", onclick: onNew }, "New conversation"), el("h2", {}, "History"), this.empty, this.list,
      el("div", { class: "history-foot" },
        el("button", { type: "button", class: "small", onclick: () => this.#export() }, "Export"),
        el("button", { type: "button", class: "small", onclick: () => this.#clear() }, "Delete all")));
  }

  async refresh(current) {
    this.current = current;
    const conversations = await store.all().catch(() => []);
    this.list.replaceChildren(...conversations.map((each) => this.#item(each)));
    this.mark(current);
  }

  mark(current) {
    this.current = current;
    for (const item of this.list.children) {
      const button = item.firstChild;
      if (item.dataset.id === current) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  #item(conversation) {
    const title = conversation.title || "Without a title";
    const item = el("li", {}, el("button", { type: "button", class: "quiet history-open", onclick: () => this.onOpen(conversation.id) }, title),
      el("button", { type: "button", class: "quiet icon small", "aria-label": `Delete ${title}`, onclick: async () => {
        await store.remove(conversation.id);
        this.onRemove(conversation.id);
        this.refresh(this.current);
      } }, "×"));
    item.dataset.id = conversation.id;
    return item;
  }

  async #export() {
    const conversations = await store.all();
    if (!conversations.length) return notify("There is nothing to export yet.");
    return store.download("lorikeet-conversations.json", conversations);
  }

  async #clear() {
    if (!confirm("Delete all conversations in this browser?")) return;
    await store.clear();
    this.onRemove(null);
    this.refresh(null);
  }
}

// The list of kept conversations.

import { el, notify } from "../dom.js";
import * as store from "../store.js";

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
    const shown = JSON.stringify(conversations.map((each) => [each.id, titleOf(each)]));
    if (shown !== this.shown) this.list.replaceChildren(...conversations.map((each) => this.#item(each))); // else the focus stays
    this.shown = shown;
    this.mark(this.current);
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
    const title = titleOf(conversation);
    const item = el("li", {}, el("button", { type: "button", class: "quiet history-open", onclick: () => this.onOpen(conversation.id) }, title),
      el("button", { type: "button", class: "quiet icon small", "aria-label": `Delete ${title}`, onclick: async () => {
        const index = [...this.list.children].indexOf(item);
        this.onRemove(conversation.id); // first, so that nothing saves it again
        await store.remove(conversation.id);
        await this.refresh(this.current);
        (this.list.children[Math.min(index, this.list.children.length - 1)]?.firstChild || this.element.firstChild).focus();
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
    this.onRemove(null);
    await store.clear();
    this.refresh(this.current);
  }
}

function titleOf({ title, draft }) {
  return title || draft?.trim().slice(0, 80) || "Without a title";
}

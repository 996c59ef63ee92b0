// The list of kept conversations: search, rename, delete, import and export.

import { newId } from "../api.js";
import { button, el, iconButton, notify } from "../dom.js";
import * as store from "../store.js";

export class HistoryPanel {
  // `actions`: open(id), begin(), removed(id or null), renamed(id, title).
  constructor(actions) {
    this.actions = actions;
    this.list = el("ul", { class: "history-list", "aria-label": "Conversations" });
    this.empty = el("p", { class: "dim small-text" });
    this.search = el("input", { type: "search", placeholder: "Search conversations", "aria-label": "Search conversations", autocomplete: "off", oninput: () => this.refresh(this.current) });
    this.chooser = el("input", { type: "file", accept: ".json,application/json", hidden: true, onchange: () => this.#import() });
    this.ofAll = [["Export", () => this.#export()], ["Delete all", () => this.#clear()]].map(([text, onclick]) => button(text, { class: "quiet small", onclick }));
    this.element = el("div", { class: "history" },
      button("New conversation", { class: "primary wide", onclick: actions.begin }, "plus"), this.search, this.empty, this.list,
      el("div", { class: "history-foot" }, button("Import", { class: "quiet small", onclick: () => this.chooser.click() }), this.chooser, this.ofAll));
  }

  async refresh(current) {
    this.current = current;
    const conversations = await store.all().catch(() => []);
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = conversations.filter((conversation) => words.every((word) => searchText(conversation).includes(word)));
    for (const shown of this.ofAll) shown.hidden = !conversations.length;
    this.search.hidden = conversations.length < 2 && !words.length;
    this.empty.hidden = matching.length > 0;
    this.empty.textContent = words.length ? "No conversation has these words." : "Conversations are kept in this browser only.";
    const shown = JSON.stringify(matching.map((conversation) => [conversation.id, titleOf(conversation)]));
    if (shown !== this.shown) this.list.replaceChildren(...matching.map((conversation) => this.#item(conversation))); // else the focus stays
    this.shown = shown;
    this.mark(this.current);
  }

  mark(current) {
    this.current = current;
    for (const item of this.list.children) {
      const opener = item.firstChild;
      if (item.dataset.id === current) opener.setAttribute("aria-current", "true");
      else opener.removeAttribute("aria-current");
    }
  }

  #item(conversation) {
    const title = titleOf(conversation);
    const item = el("li", {}, el("button", { type: "button", class: "quiet history-open", title, onclick: () => this.actions.open(conversation.id) }, title),
      iconButton("edit", `Rename ${title}`, { class: "small", onclick: () => this.#rename(item, conversation, title) }),
      iconButton("trash", `Delete ${title}`, { class: "small", onclick: async () => {
        const index = [...this.list.children].indexOf(item);
        this.actions.removed(conversation.id); // first, so that nothing saves it again
        await store.remove(conversation.id);
        await this.refresh(this.current);
        (this.list.children[Math.min(index, this.list.children.length - 1)]?.firstChild || this.element.firstChild).focus();
      } }));
    item.dataset.id = conversation.id;
    return item;
  }

  #rename(item, conversation, title) {
    let isOver = false;
    const end = async (isKept) => {
      if (isOver) return;
      isOver = true;
      this.shown = "";
      const text = input.value.trim();
      if (isKept && text && text !== title) await this.actions.renamed(conversation.id, text.slice(0, 200));
      else await this.refresh(this.current);
      [...this.list.children].find((other) => other.dataset.id === conversation.id)?.firstChild.focus();
    };
    const input = el("input", { value: title, "aria-label": "Title", maxLength: 200, onblur: () => end(true), onkeydown: (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    } });
    item.replaceChildren(input);
    input.select();
  }

  async #export() {
    const conversations = await store.all();
    if (!conversations.length) return notify("There is nothing to export yet.");
    return store.download("lorikeet-conversations.json", conversations);
  }

  // Adds the conversations of a file that Export wrote; those that are here already stay as they are.
  async #import() {
    const [file] = this.chooser.files;
    this.chooser.value = "";
    if (!file) return;
    let count = 0;
    try {
      const conversations = JSON.parse(await file.text());
      if (!Array.isArray(conversations) || !conversations.every(isConversation)) throw new Error();
      const known = new Set((await store.all()).map(({ id }) => id));
      for (const conversation of conversations) {
        if (known.has(conversation.id)) continue;
        await store.save({ ...conversation, id: conversation.id || newId() });
        count += 1;
      }
      notify(count ? `${count} ${count === 1 ? "conversation was" : "conversations were"} added.` : "All conversations of this file are here already.");
    } catch {
      notify(`${file.name} is not a file that Export wrote.`);
    }
    await this.refresh(this.current);
  }

  async #clear() {
    if (!confirm("Delete all conversations in this browser?")) return;
    this.actions.removed(null);
    await store.clear();
    this.refresh(this.current);
  }
}

const isText = (value) => typeof value === "string";

function isConversation(value) {
  return isText(value?.id) && ["chat", "completion"].includes(value.mode) && Array.isArray(value.settings) && value.settings.length > 0 && Array.isArray(value.turns)
    && value.turns.every((turn) => isText(turn?.prompt) && Array.isArray(turn.answers) && turn.answers.every((answer) => isText(answer?.text) && Array.isArray(answer.tokens) && answer.settings));
}

function titleOf({ title, draft }) {
  return title || draft?.trim().slice(0, 80) || "Without a title";
}

function searchText(conversation) {
  const texts = conversation.turns.flatMap((turn) => [turn.prompt, ...turn.answers.map((answer) => answer.text)]);
  return [titleOf(conversation), ...texts].join("\n").toLowerCase();
}

// Saves each conversation shortly after it changes, and keeps those in memory whose answers are running.

import { notify } from "../dom.js";
import * as store from "../store.js";

const SAVE_MS = 400;

const isRunning = (conversation) => conversation.turns.some((turn) => turn.answers.some((answer) => answer.state === "running"));

export class Autosave {
  constructor() {
    this.unsaved = new Set();
    this.running = new Map();
    addEventListener("pagehide", () => this.write());
    document.addEventListener("visibilitychange", () => document.hidden && this.write());
  }

  async find(id) {
    return this.running.get(id) || store.find(id);
  }

  // All conversations that this page still changes.
  held() {
    return [...this.unsaved, ...this.running.values()];
  }

  // Saves it soon, even if another conversation is shown by then.
  note(conversation) {
    if (conversation.isGone) return;
    this.unsaved.add(conversation);
    if (isRunning(conversation)) this.running.set(conversation.id, conversation);
    this.timer ||= setTimeout(() => this.write(), SAVE_MS);
  }

  async write() {
    clearTimeout(this.timer);
    this.timer = 0;
    const all = [...this.unsaved];
    this.unsaved.clear();
    await Promise.all(all.map((each) => this.#save(each))).catch((error) => notify(`This browser does not keep conversations: ${error.message}`));
  }

  // Forgets a deleted conversation, so that nothing saves it again.
  drop(conversation) {
    conversation.isGone = true;
    this.unsaved.delete(conversation);
    this.running.delete(conversation.id);
  }

  async #save(conversation) {
    if (conversation.isGone) return;
    const isEmpty = !conversation.turns.length && !conversation.draft?.trim();
    conversation.updated = Date.now();
    await (isEmpty ? store.remove(conversation.id) : store.save(conversation));
    if (!isRunning(conversation)) this.running.delete(conversation.id);
  }
}

// The playground: conversations, one or two sides, and the settings of each side.

import { json, newId } from "../api.js";
import { chatBody, completionBody, detailed, newAnswer, resume, run, stop } from "../answers/answer.js";
import { AnswerView } from "../answers/answer-view.js";
import { resultForm, resultView } from "../answers/calls.js";
import { messagesOf, sidesWithCalls, upgrade } from "./conversation.js";
import { showCode } from "./copy.js";
import { el, notify } from "../dom.js";
import { apply, examplesOf, introduction } from "./examples.js";
import { HistoryPanel } from "./history.js";
import { Autosave } from "./autosave.js";
import { Picker } from "./picker.js";
import { SettingsPanel, defaults } from "./settings.js";
import { firstDifference } from "../answers/tokens.js";

const CURRENT = "lorikeet-conversation";

export class Playground {
  constructor(element, capabilities) {
    this.root = element;
    this.capabilities = capabilities;
    this.views = new Map();
    this.followed = new WeakSet(); // answers whose streams this page reads
    this.autosave = new Autosave();
    this.side = 0;
    this.picker = new Picker(capabilities.model, (id, source) => this.#pick(id, source));
    this.settings = new SettingsPanel(capabilities, () => this.picker.open(this.#current().adapter), () => this.#save());
    this.history = new HistoryPanel((id) => this.#load(id), () => this.#begin(), (id) => this.#removed(id));
    this.#build();
  }

  async start() {
    const id = sessionStorage.getItem(CURRENT) || localStorage.getItem(CURRENT);
    const found = id ? await this.autosave.find(id).catch(() => null) : null;
    if (found) this.#open(upgrade(found));
    else this.#new();
    this.history.refresh(this.conversation.id);
  }

  #build() {
    this.turns = el("div", { class: "turns" });
    this.input = el("textarea", { rows: 3, id: "prompt", required: true, onkeydown: (event) => this.#inputKey(event), oninput: () => this.#drafted() });
    this.inputLabel = el("label", { class: "sr", htmlFor: "prompt" });
    this.submit = el("button", { type: "submit", class: "primary" }, "Send");
    this.modes = ["chat", "completion"].map((mode) => el("button", { type: "button", class: "small", onclick: () => this.#setMode(mode) }, mode === "chat" ? "Chat" : "Completion"));
    this.compare = el("button", { type: "button", class: "small", "aria-pressed": "false", onclick: () => this.#toggleCompare() }, "Compare two");
    this.sides = el("div", { class: "side-tabs", role: "group", "aria-label": "Settings of", hidden: true });
    this.historyToggle = this.#toggle("History", "history");
    const toggles = el("span", { class: "panel-toggles" }, this.historyToggle, this.#toggle("Settings", "settings"));
    this.form = el("form", { class: "composer panel", onsubmit: (event) => this.#send(event) }, this.inputLabel, this.input,
      el("div", { class: "composer-foot" }, el("span", { class: "dim hint" }, "Ctrl + Enter sends"), el("span", { class: "grow" }), this.submit));
    this.side_ = el("aside", { class: "settings-panel panel", id: "panel-settings", "aria-label": "Settings" }, this.sides, this.settings.element);
    this.past = el("aside", { class: "history-panel", id: "panel-history", "aria-label": "Conversations", onkeydown: (event) => event.key === "Escape" && this.#closeHistory() },
      el("button", { type: "button", class: "small drawer-close", onclick: () => this.#closeHistory() }, "Close"), this.history.element);
    this.root.append(this.past, el("div", { class: "stage" },
      el("div", { class: "stage-head" }, el("span", { class: "segmented", role: "group", "aria-label": "Kind of prompt" }, this.modes), this.compare,
        el("span", { class: "grow" }), toggles), this.turns, this.form), this.side_);
  }

  #toggle(name, panel) {
    const button = el("button", { type: "button", class: "small", "aria-expanded": "false", "aria-controls": `panel-${panel}`, onclick: () => {
      const isOpen = this.root.classList.toggle(`open-${panel}`);
      button.setAttribute("aria-expanded", String(isOpen));
    } }, name);
    return button;
  }

  // Where it is a drawer, it covers what was chosen in it.
  #closeHistory() {
    if (!this.root.classList.contains("open-history")) return;
    this.historyToggle.click();
    this.historyToggle.focus();
  }

  // Conversations

  #new() {
    const before = this.conversation?.settings;
    const mode = this.conversation?.mode || (this.capabilities.chat ? "chat" : "completion");
    const settings = before ? structuredClone(before) : [defaults(this.capabilities)];
    this.#open({ id: newId(), title: "", mode, updated: Date.now(), settings, turns: [] });
    this.input.focus();
  }

  #begin() {
    this.#closeHistory();
    this.#new();
  }

  async #load(id) {
    this.#closeHistory();
    const found = await this.autosave.find(id);
    if (found) this.#open(upgrade(found));
  }

  #open(conversation) {
    this.autosave.write().then(() => this.history.refresh(this.conversation.id));
    this.conversation = conversation;
    this.side = 0;
    sessionStorage.setItem(CURRENT, conversation.id);
    localStorage.setItem(CURRENT, conversation.id);
    this.views.clear();
    this.turns.replaceChildren();
    conversation.turns.forEach((turn) => this.#showTurn(turn));
    this.input.value = conversation.draft || (conversation.mode === "completion" && conversation.turns.at(-1)?.prompt) || "";
    this.#refresh();
    for (const turn of conversation.turns) for (const answer of turn.answers) if (answer.state === "running") this.#resume(conversation, turn, answer);
    this.history.mark(conversation.id);
  }

  // `id` is null where all are deleted. Nobody can see the rest of a running answer then, so it is stopped.
  #removed(id) {
    const open = [this.conversation, ...this.autosave.held()];
    for (const each of new Set(open.filter((conversation) => id === null || conversation.id === id))) {
      this.autosave.drop(each);
      this.#stopAll(each, each.turns);
    }
    if (this.conversation.isGone) this.#new();
  }

  // A prompt that is not sent yet is kept with its conversation.
  #drafted() {
    this.conversation.draft = this.input.value;
    this.#save();
  }

  #setInput(text) {
    this.input.value = text;
    this.#drafted();
  }

  #setMode(mode) {
    if (mode === this.conversation.mode) return;
    if (this.conversation.turns.length) this.#new();
    this.conversation.mode = mode;
    this.#refresh();
    this.#save();
  }

  #toggleCompare() {
    const { conversation } = this;
    if (conversation.settings.length > 1) conversation.settings.length = 1;
    else {
      const other = structuredClone(conversation.settings[0]);
      if (other.method !== "off") other.method = "off";
      conversation.settings.push(other);
    }
    this.side = conversation.settings.length - 1;
    this.#refresh();
    this.#save();
  }

  #pick(id, source) {
    Object.assign(this.#current(), { adapter: id, source });
    this.#refresh();
    this.#save();
  }

  #current() {
    return this.conversation.settings[this.side];
  }

  #refresh() {
    const { conversation } = this;
    const isChat = conversation.mode === "chat";
    const isDouble = conversation.settings.length > 1;
    this.root.classList.toggle("double", isDouble);
    ["chat", "completion"].forEach((mode, index) => this.modes[index].setAttribute("aria-pressed", String(mode === conversation.mode)));
    // An adapter may have a template of its own, which the server reads at its first chat.
    const mayChat = this.capabilities.chat || isChat || conversation.settings.some((settings) => settings.adapter);
    this.modes[0].disabled = !mayChat;
    this.modes[0].title = mayChat ? "" : "The base model has no chat template. Choose an adapter that has one";
    this.compare.setAttribute("aria-pressed", String(isDouble));
    this.inputLabel.textContent = isChat ? "Message" : "Text to complete";
    this.input.placeholder = isChat ? "Ask something" : "Text that the model continues";
    this.sides.hidden = !isDouble;
    this.sides.replaceChildren(...conversation.settings.map((_, index) => el("button", {
      type: "button", class: "small", "aria-pressed": String(index === this.side), onclick: () => {
        this.side = index;
        this.#refresh();
      },
    }, `Side ${"AB"[index]}`)));
    this.settings.show(this.#current(), { isChat });
    if (!conversation.turns.length) this.turns.replaceChildren(this.#welcome());
  }

  #welcome() {
    const { mode } = this.conversation;
    const examples = examplesOf(this.capabilities, mode).map((example) =>
      el("button", { type: "button", title: example.prompt, onclick: () => this.#try(example) }, example.title));
    return el("div", { class: "welcome" }, el("h2", {}, mode === "chat" ? "Start a conversation" : "Complete a text"),
      el("p", { class: "dim" }, introduction(this.capabilities), "Every token is coloured by what proposed it: the model itself, or a draft that the model agreed with. ",
        "“Compare two” runs a prompt with two adapters, or with and without speculative decoding, and marks where the answers first differ."),
      el("div", { class: "examples" }, examples));
  }

  async #try(example) {
    const { data } = example.adapter ? await json("v1/models").catch(() => ({ data: [] })) : { data: [] };
    for (const settings of this.conversation.settings) apply(example, settings, data);
    this.#refresh();
    this.#setInput(example.prompt);
    this.input.focus();
  }

  // Turns

  #inputKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#send(event);
  }

  #send(event) {
    event.preventDefault();
    const prompt = this.input.value;
    if (!prompt.trim()) return this.input.focus();
    if (!this.settings.check()) {
      this.root.classList.add("open-settings");
      return undefined;
    }
    const { conversation } = this;
    if (conversation.mode === "completion") this.#stopAll(conversation, conversation.turns.splice(0));
    if (!conversation.turns.length) this.turns.replaceChildren();
    conversation.title ||= prompt.trim().slice(0, 80);
    const turn = { prompt, answers: [] };
    conversation.turns.push(turn);
    if (conversation.mode === "chat") this.input.value = "";
    conversation.draft = "";
    this.#answerTurn(turn);
    return undefined;
  }

  #sendResults(results) {
    const before = this.conversation.turns.at(-1);
    before.drafts = results.map(({ text }) => text);
    const turn = { prompt: "", results, answers: [] };
    this.conversation.turns.push(turn);
    this.#answerTurn(turn);
    this.input.focus();
  }

  async #answerTurn(turn) {
    const { conversation } = this;
    const { settings, turns } = conversation;
    const random = Number(crypto.getRandomValues(new BigUint64Array(1))[0] & 0x1fffffffffffffn);
    turn.sides = settings.length;
    const sides = turn.results ? sidesWithCalls(turns.at(-2), settings.length) : [...settings.keys()];
    turn.answers = sides.map((side) => newAnswer(structuredClone(settings[side]), settings[side].seed === "" ? random : settings[side].seed, side));
    this.#showTurn(turn);
    this.autosave.note(conversation);
    await this.autosave.write(); // so that a reload finds the ids of the answers
    this.history.refresh(this.conversation.id);
    for (const answer of turn.answers) {
      this.followed.add(answer);
      run(answer, () => this.#request(conversation, turn, answer), () => this.#changed(conversation, turn, answer));
    }
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  #resume(conversation, turn, answer) {
    if (this.followed.has(answer)) return;
    this.followed.add(answer);
    this.autosave.note(conversation);
    resume(answer, () => this.#changed(conversation, turn, answer));
  }

  #request(conversation, turn, { settings, seed, side }) {
    if (conversation.mode !== "chat") return { path: "generate_stream", body: completionBody(turn.prompt, settings, seed) };
    const body = chatBody(messagesOf(conversation, turn, side), settings, seed, this.capabilities.model);
    return { path: "v1/chat/completions", body: detailed(body, settings) };
  }

  #regenerate(turn) {
    const { conversation } = this;
    const index = conversation.turns.indexOf(turn);
    this.#stopAll(conversation, conversation.turns.slice(index));
    conversation.turns.length = index + 1;
    this.#redraw();
    this.results?.remove();
    this.turns.lastChild?.remove();
    this.#answerTurn(turn);
  }

  #edit(turn) {
    const { conversation } = this;
    this.#stopAll(conversation, conversation.turns.splice(conversation.turns.indexOf(turn)));
    this.#redraw();
    if (turn.results) this.results.querySelector("textarea").focus();
    else {
      this.#setInput(turn.prompt);
      this.input.focus();
    }
    this.#save();
  }

  #stopAll(conversation, turns) {
    for (const turn of turns) for (const answer of turn.answers) stop(answer, () => this.#changed(conversation, turn, answer));
  }

  #redraw() {
    this.views.clear();
    this.turns.replaceChildren();
    this.conversation.turns.forEach((turn) => this.#showTurn(turn));
    this.#refresh();
  }

  #showTurn(turn) {
    const isDouble = turn.answers.length > 1;
    const { conversation } = this;
    this.results?.remove();
    const actions = {
      stop: (answer) => stop(answer, () => this.#changed(conversation, turn, answer)),
      regenerate: () => this.#regenerate(turn),
      code: (answer) => showCode({
        isChat: conversation.mode === "chat", prompt: turn.prompt, settings: answer.settings, seed: answer.seed, model: this.capabilities.model,
        messages: messagesOf(conversation, turn, answer.side),
      }),
    };
    const views = turn.answers.map((answer) => new AnswerView(answer, turn.sides > 1 ? "AB"[answer.side] : "", actions));
    turn.answers.forEach((answer, index) => this.views.set(answer, views[index]));
    this.turns.append(el("section", { class: `turn${isDouble ? " double" : ""}`, "aria-label": `Prompt and answer ${conversation.turns.indexOf(turn) + 1}` },
      el("div", { class: "prompt panel" }, turn.results ? el("div", { class: "results-given" }, turn.results.map(resultView)) : el("div", { class: "prompt-text" }, turn.prompt),
        el("button", { type: "button", class: "small quiet", onclick: () => this.#edit(turn) }, "Edit")),
      el("div", { class: "answers" }, views.map((view) => view.element))));
    this.#draw(turn);
  }

  // Many tokens may come between two frames: each frame draws once.
  #changed(conversation, turn, answer) {
    this.autosave.note(conversation);
    if (answer.state !== "running") this.autosave.write();
    if (conversation !== this.conversation) return;
    this.dirty ||= new Set();
    this.dirty.add(turn);
    if (this.frame) return;
    const draw = () => {
      this.frame = 0;
      const isAtEnd = this.turns.scrollHeight - this.turns.scrollTop - this.turns.clientHeight < 80;
      for (const each of this.dirty) this.#draw(each);
      this.dirty.clear();
      if (isAtEnd) this.turns.scrollTop = this.turns.scrollHeight;
    };
    this.frame = document.hidden ? setTimeout(draw, 200) : requestAnimationFrame(draw);
  }

  #draw(turn) {
    const [first, second] = turn.answers;
    const isOver = second && first.state !== "running" && second.state !== "running";
    const found = second ? firstDifference(first.tokens, second.tokens, isOver) : -1;
    const sentence = !second ? "" : found >= 0 ? `First difference: token ${found + 1}.` : isOver && first.tokens.length ? "Both answers are the same." : "";
    for (const answer of turn.answers) this.views.get(answer)?.update([found, sentence]);
    this.#askResults(turn);
  }

  // A form below the last answers, where they end with calls.
  #askResults(turn) {
    const isLast = turn === this.conversation.turns.at(-1);
    if (!isLast || this.results?.isConnected || !turn.answers.some((answer) => answer.calls.length)) return;
    if (turn.answers.some((answer) => ["running", "failed"].includes(answer.state))) return;
    this.results = resultForm(turn, (results) => this.#sendResults(results));
    this.turns.append(this.results);
  }

  #save() {
    this.autosave.note(this.conversation);
  }
}

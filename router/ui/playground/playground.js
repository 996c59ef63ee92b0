// The playground: conversations, one or two sides, and the settings of each side.

import { json, newId } from "../api.js";
import { chatBody, completionBody, detailed, newAnswer, resume, run, stop } from "../answers/answer.js";
import { AnswerView } from "../answers/answer-view.js";
import { resultForm, resultView } from "../answers/calls.js";
import { firstDifference } from "../answers/tokens.js";
import { button, el, icon, iconButton, notify } from "../dom.js";
import { Drawer } from "../drawer.js";
import { Attachments, promptWith } from "./attachments.js";
import { Autosave } from "./autosave.js";
import { messagesOf, sidesWithCalls, upgrade } from "./conversation.js";
import { apply, comparison, examplesOf, introduction } from "./examples.js";
import { HistoryPanel } from "./history.js";
import { SettingsPanel, defaults } from "./settings.js";

const CURRENT = "lorikeet-conversation";
const SETTINGS_OPEN = "lorikeet-settings-open";
const WAITING = { loading: "Waits for the model", gone: "Waits for the server", draining: "The server takes no new messages", key: "Needs another key" };

export class Playground {
  // `status` is the server's; `conversations` the element for their list; `sidebar` the drawer that it is in.
  constructor(element, { capabilities, status, sidebar, askKey, conversations }) {
    this.root = element;
    this.capabilities = capabilities;
    this.status = status;
    this.sidebar = sidebar;
    this.askKey = askKey;
    this.views = new Map();
    this.followed = new WeakSet(); // answers whose streams this page reads
    this.autosave = new Autosave();
    this.side = 0;
    this.settings = new SettingsPanel(capabilities, () => this.#save());
    this.history = new HistoryPanel({ open: (id) => this.#load(id), begin: () => this.#begin(), removed: (id) => this.#removed(id), renamed: (id, title) => this.#renamed(id, title) });
    conversations.append(this.history.element);
    this.#build();
  }

  async start() {
    const id = sessionStorage.getItem(CURRENT) || localStorage.getItem(CURRENT);
    const kept = id ? await this.autosave.find(id).catch(() => null) : null;
    if (kept) this.#open(upgrade(kept));
    else this.#new();
    this.history.refresh(this.conversation.id);
  }

  // The server can do something else, or waits.
  serverChanged(capabilities) {
    Object.assign(this.capabilities, capabilities);
    this.#showSending();
  }

  // A key that is pressed anywhere.
  shortcut(event, isWriting) {
    const isControl = event.ctrlKey || event.metaKey;
    const actions = {
      k: () => isControl && !event.shiftKey && this.#choose(this.side),
      o: () => isControl && event.shiftKey && this.#begin(),
      ".": () => isControl && (this.panel.isOpen ? this.panel.close() : this.panel.open()),
      "/": () => !isWriting && !isControl && this.input.focus(),
      escape: () => !document.querySelector("dialog[open]") && this.#stopRunning(),
    };
    if (!this.root.hidden && actions[event.key.toLowerCase()]?.() !== false && event.key.toLowerCase() in actions && (isControl || !isWriting || event.key === "Escape")) event.preventDefault();
  }

  #build() {
    this.turns = el("div", { class: "turns" });
    this.input = el("textarea", { rows: 1, id: "prompt", onkeydown: (event) => this.#inputKey(event), oninput: () => this.#drafted() });
    this.inputLabel = el("label", { class: "sr", htmlFor: "prompt" });
    this.submit = el("button", { type: "submit", class: "primary round", title: "Send", "aria-label": "Send" }, icon("send"));
    this.halt = iconButton("stop", "Stop", { class: "round", hidden: true, onclick: () => this.#stopRunning() });
    this.files = new Attachments(() => this.#drafted());
    this.modes = ["chat", "completion"].map((mode) => el("button", { type: "button", class: "small", onclick: () => this.#setMode(mode) }, mode === "chat" ? "Chat" : "Completion"));
    this.compare = button("Compare", { class: "quiet", "aria-pressed": "false", title: "One prompt with two settings", onclick: () => this.#toggleCompare() }, "columns");
    this.sides = el("div", { class: "segmented side-tabs", role: "group", "aria-label": "Settings of", hidden: true });
    this.chips = el("div", { class: "chips" });
    this.hint = el("span", { class: "dim hint" }, el("kbd", {}, "Enter"), " sends, ", el("kbd", {}, "Shift"), " ", el("kbd", {}, "Enter"), " breaks the line");
    this.form = el("form", { class: "composer", onsubmit: (event) => this.#send(event) }, this.files.list, this.inputLabel, this.input,
      el("div", { class: "composer-foot" }, this.files.button, el("span", { class: "segmented", role: "group", "aria-label": "Kind of prompt" }, this.modes),
        el("span", { class: "grow" }), this.hint, this.halt, this.submit));
    this.panelElement = el("aside", { class: "settings-panel", id: "panel-settings", "aria-label": "Settings" }, el("h2", {}, "Settings"), this.sides, this.settings.element);
    const stage = el("div", { class: "stage" });
    this.root.append(stage, this.panelElement);
    this.panel = new Drawer(this.panelElement, "(max-width: 899px)", "Settings", { symbol: "sliders", onClose: () => localStorage.removeItem(SETTINGS_OPEN) });
    const open = this.panel.open.bind(this.panel);
    this.panel.open = (opener) => {
      if (!this.panel.narrow.matches) localStorage.setItem(SETTINGS_OPEN, "true");
      open(opener);
    };
    if (localStorage.getItem(SETTINGS_OPEN) && !this.panel.narrow.matches) open(null);
    stage.append(el("header", { class: "bar" }, this.sidebar.toggle(), this.chips, el("span", { class: "grow" }), this.compare, this.panel.toggle()),
      this.turns, el("div", { class: "dock" }, this.status.element, this.form));
    for (const kind of ["dragover", "drop"]) stage.addEventListener(kind, (event) => this.#dropped(event));
  }

  // Text files go with the message; a folder or a .safetensors file is an adapter.
  async #dropped(event) {
    if (![...(event.dataTransfer?.types || [])].includes("Files")) return;
    event.preventDefault();
    if (event.type === "drop") {
      const { filesOf, isAdapter, offerUpload } = await import("./upload.js");
      const files = await filesOf(event.dataTransfer);
      if (isAdapter(files)) offerUpload(files, { capabilities: this.capabilities, askKey: this.askKey, onLoaded: (name) => this.#pick(name, "") });
      else await this.files.add(files);
    }
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
    this.sidebar.close();
    location.hash = "#playground";
    this.#new();
  }

  async #load(id) {
    this.sidebar.close();
    location.hash = "#playground";
    const kept = await this.autosave.find(id);
    if (kept) this.#open(upgrade(kept));
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
    this.files.set(conversation.files || []);
    this.#setInput(conversation.draft || (conversation.mode === "completion" && conversation.turns.at(-1)?.prompt) || "", false);
    this.#refresh();
    for (const turn of conversation.turns) for (const answer of turn.answers) if (answer.state === "running") this.#resume(conversation, turn, answer);
    this.history.mark(conversation.id);
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  // `id` is null where all are deleted. Nobody can see the rest of a running answer then, so it is stopped.
  #removed(id) {
    const open = [this.conversation, ...this.autosave.held()];
    for (const one of new Set(open.filter((conversation) => id === null || conversation.id === id))) {
      this.autosave.drop(one);
      this.#stopAll(one, one.turns);
    }
    if (this.conversation.isGone) this.#new();
  }

  async #renamed(id, title) {
    const kept = this.conversation.id === id ? this.conversation : await this.autosave.find(id);
    if (!kept) return;
    kept.title = title;
    this.autosave.note(kept);
    await this.autosave.write();
    await this.history.refresh(this.conversation.id);
  }

  // A prompt that is not sent yet is kept with its conversation.
  #drafted() {
    this.conversation.draft = this.input.value;
    this.conversation.files = this.files.all;
    this.#fit();
    this.#showSending();
    this.#save();
  }

  #setInput(text, isNew = true) {
    this.input.value = text;
    if (isNew) return this.#drafted();
    this.#fit();
    this.#showSending();
    return undefined;
  }

  // The field grows with its text, where the browser does not do it by itself.
  #fit() {
    if (CSS.supports("field-sizing", "content")) return;
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
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
    const isEmpty = !conversation.turns.length && !this.input.value.trim();
    if (conversation.settings.length > 1) conversation.settings.length = 1;
    else {
      const other = structuredClone(conversation.settings[0]);
      if (other.method !== "off") other.method = "off";
      conversation.settings.push(other);
    }
    this.side = conversation.settings.length - 1;
    this.#refresh();
    if (conversation.settings.length > 1 && isEmpty) this.#try(comparison(this.capabilities, conversation.mode));
    this.#save();
  }

  async #choose(side) {
    this.side = side;
    this.loadingPicker ||= import("./picker.js").then(({ Picker }) => new Picker(this.capabilities, (id, source) => this.#pick(id, source), this.askKey));
    (await this.loadingPicker).open(this.#current().adapter);
  }

  #pick(id, source) {
    Object.assign(this.#current(), { adapter: id, source: source || "" });
    this.#refresh();
    this.#save();
    this.chips.querySelectorAll(".adapter-button")[this.side]?.focus();
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
    this.input.placeholder = isChat ? "Write a message" : "Write a text that the model continues";
    this.sides.hidden = !isDouble;
    this.sides.replaceChildren(...conversation.settings.map((_, index) => el("button", {
      type: "button", class: "small", "aria-pressed": String(index === this.side), onclick: () => {
        this.side = index;
        this.#refresh();
        this.sides.children[index].focus();
      },
    }, `Side ${"AB"[index]}`)));
    this.chips.replaceChildren(el("span", { class: "model", title: this.capabilities.model }, shortName(this.capabilities.model)),
      ...(this.capabilities.adapters ? conversation.settings.map((settings, side) => this.#chip(settings, side, isDouble)) : []));
    this.settings.show(this.#current(), { isChat });
    this.#showSending();
    if (!conversation.turns.length) this.turns.replaceChildren(this.#welcome());
  }

  // The adapter of a side; pressing it chooses another.
  #chip({ adapter }, side, isDouble) {
    const name = adapter || "No adapter";
    return el("button", {
      type: "button", class: "adapter-button", "aria-label": `${isDouble ? `Side ${"AB"[side]}: ` : ""}Adapter: ${name}. Choose another`, onclick: () => this.#choose(side),
    }, isDouble ? el("span", { class: "side-mark", "data-side": "AB"[side] }) : null, el("span", { class: "picker-name" }, name), icon("chevron"));
  }

  // What may be sent now.
  #showSending() {
    if (!this.conversation) return;
    const isRunning = this.#running().length > 0;
    const isSingle = this.conversation.settings.length === 1;
    const hadFocus = document.activeElement === this.halt;
    this.halt.hidden = !(isRunning && isSingle);
    this.submit.hidden = isRunning && isSingle;
    if (hadFocus && this.halt.hidden) this.input.focus();
    const isEmpty = !this.input.value.trim() && !this.files.all.length;
    this.submit.disabled = !this.status.isReady || isEmpty;
    this.submit.title = WAITING[this.status.state] || (isEmpty ? "Write something first" : "Send");
  }

  #running() {
    return this.conversation.turns.flatMap((turn) => turn.answers.filter((answer) => answer.state === "running"));
  }

  #stopRunning() {
    if (!this.#running().length) return false;
    this.#stopAll(this.conversation, this.conversation.turns);
    return true;
  }

  #welcome() {
    const { mode, settings } = this.conversation;
    const isDouble = settings.length > 1;
    const examples = isDouble ? [comparison(this.capabilities, mode)] : examplesOf(this.capabilities, mode);
    const cards = examples.map((example) => el("button", { type: "button", class: "example", onclick: () => this.#try(example) },
      el("strong", {}, example.title), el("span", { class: "dim" }, example.prompt.length > 90 ? `${example.prompt.slice(0, 88)}…` : example.prompt)));
    const [title, text] = isDouble
      ? ["Compare two settings", "Both sides get the same prompt. Colours show what proposed each token: the model itself, or a draft that the model agreed with. Drafts never change the text."]
      : mode === "chat" ? ["How can I help?", introduction(this.capabilities)] : ["Continue a text", introduction(this.capabilities)];
    return el("div", { class: "welcome" }, el("span", { class: "mark big", "aria-hidden": "true" }), el("h2", {}, title), text ? el("p", { class: "dim" }, text) : null, el("div", { class: "examples" }, cards));
  }

  async #try(example) {
    const { data } = example.adapter ? await json("v1/models").catch(() => ({ data: [] })) : { data: [] };
    this.conversation.settings.forEach((settings, side) => apply(example, settings, data, side));
    this.#refresh();
    this.#setInput(example.prompt);
    this.input.focus();
  }

  // Turns

  #inputKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.#send(event);
    else if (event.key === "ArrowUp" && !this.input.value && this.conversation.turns.length) {
      event.preventDefault();
      this.#edit(this.conversation.turns.at(-1));
    }
  }

  #send(event) {
    event.preventDefault();
    const text = this.input.value;
    const files = this.files.all;
    if (!text.trim() && !files.length) return this.input.focus();
    if (!this.status.isReady) return this.status.check();
    const prompt = promptWith(text, files);
    if (this.capabilities.max_input_length && prompt.length > 12 * this.capabilities.max_input_length) {
      return notify(`This is too long: the model takes ${this.capabilities.max_input_length} tokens, which are about ${4 * this.capabilities.max_input_length} characters. Shorten it or attach less.`);
    }
    if (this.conversation.mode === "chat" && this.#running().length) return undefined;
    if (!this.settings.isRight()) {
      this.panel.open();
      this.settings.check();
      return undefined;
    }
    const { conversation } = this;
    if (conversation.mode === "completion") this.#stopAll(conversation, conversation.turns.splice(0));
    if (!conversation.turns.length) this.turns.replaceChildren();
    conversation.title ||= (text.trim() || files[0].name).slice(0, 80);
    const turn = { prompt, answers: [], ...(files.length ? { text, files } : {}) };
    conversation.turns.push(turn);
    if (conversation.mode === "chat") this.#setInput("");
    this.files.set([]);
    Object.assign(conversation, { draft: "", files: [] });
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
    this.#showSending();
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
      this.files.set(turn.files || []);
      this.#setInput(turn.text ?? turn.prompt);
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
      again: () => this.#regenerate(turn),
      key: () => this.askKey(),
      adapter: (answer) => this.#choose(Math.min(answer.side, conversation.settings.length - 1)),
      code: async (answer) => (await import("./copy.js")).showCode({
        isChat: conversation.mode === "chat", prompt: turn.prompt, settings: answer.settings, seed: answer.seed, model: this.capabilities.model,
        draftTokens: this.capabilities.speculation.default_tokens, messages: messagesOf(conversation, turn, answer.side),
      }),
    };
    const views = turn.answers.map((answer) => new AnswerView(answer, { label: turn.sides > 1 ? "AB"[answer.side] : "", isPlain: conversation.mode !== "chat" }, actions));
    turn.answers.forEach((answer, index) => this.views.set(answer, views[index]));
    this.turns.append(el("section", { class: `turn${isDouble ? " double" : ""}`, "aria-label": `Prompt and answer ${conversation.turns.indexOf(turn) + 1}` },
      el("div", { class: "prompt" }, el("div", { class: "bubble" }, turn.results ? el("div", { class: "results-given" }, turn.results.map(resultView)) : null,
        (turn.files || []).map(({ name }) => el("span", { class: "file-tag" }, icon("file"), name)),
        turn.results ? null : el("div", { class: "prompt-text" }, turn.text ?? turn.prompt)),
      iconButton("edit", "Edit", { class: "small", onclick: () => this.#edit(turn) })),
      el("div", { class: "answers" }, views.map((view) => view.element))));
    this.#draw(turn);
  }

  // Many tokens may come between two frames: each frame draws once.
  #changed(conversation, turn, answer) {
    this.autosave.note(conversation);
    if (answer.state !== "running") this.autosave.write();
    if (answer.problem?.status === null || answer.note) this.status.check();
    if (conversation !== this.conversation) return;
    this.dirty ||= new Set();
    this.dirty.add(turn);
    if (this.frame) return;
    const draw = () => {
      this.frame = 0;
      const isAtEnd = this.turns.scrollHeight - this.turns.scrollTop - this.turns.clientHeight < 80;
      for (const changed of this.dirty) this.#draw(changed);
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
    this.#showSending();
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

// The last part of a path, or of a name with an owner.
const shortName = (name) => name.replace(/\/+$/, "").split("/").at(-1);

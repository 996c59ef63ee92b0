// Shows one answer: its text or its tokens, its figures, and what can be done with it.

import { statistics } from "./answer.js";
import { callView } from "./calls.js";
import { button, copyButton, duration, el, iconButton, number } from "../dom.js";
import { explain } from "../problems.js";
import { TokenView, legend } from "./tokens.js";

const FINISH = { length: "It reached the longest answer that the settings allow.", stop_sequence: "It ended at a stop string." };
const SHOWN = "lorikeet-tokens";
const REMEDIES = { again: "Try again", key: "Enter a key", adapter: "Choose an adapter" };

// The module with the parser is fetched with the first answer.
let markdown = null;
const loadMarkdown = () => (markdown ||= import("./markdown.js"));

const named = (name) => ({ class: "quiet", "aria-label": name, title: name });

// Whether answers are shown as tokens, unless one is switched.
export const prefersTokens = () => localStorage.getItem(SHOWN) === "true";

export function titleOf({ adapter, method, draftTokens }, isCompared) {
  const drafts = method === "off" || draftTokens === 0 ? "without drafts" : "with drafts";
  return [adapter || "No adapter", isCompared ? drafts : ""].filter(Boolean).join(" · ");
}

export class AnswerView {
  // `label` is A or B, where two are compared; `isPlain`: the text goes on with the prompt, and is no Markdown.
  constructor(answer, { label = "", isPlain = false }, actions) {
    this.answer = answer;
    this.isPlain = isPlain;
    this.actions = actions;
    this.tokenView = new TokenView(`Answer ${label}`.trim());
    this.text = el("div", { class: isPlain ? "plain" : "markdown" });
    this.reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), el("div", { class: "plain" }));
    this.calls = el("div", { class: "calls", role: "status", hidden: true });
    this.stats = el("dl", { class: "stats" });
    this.legend = el("ul", { class: "legend", "aria-label": "Tokens by source" });
    this.details = el("div", { class: "details" }, this.legend, this.stats);
    this.note = el("p", { class: "answer-note", role: "status", hidden: true });
    this.remedy = button("", { class: "small", hidden: true, onclick: () => actions[this.remedyKind](answer) });
    this.stop = button("Stop", { class: "small stop", onclick: () => actions.stop(answer) }, "stop");
    this.mode = button("Tokens", { ...named("Tokens and figures"), "aria-pressed": "false", onclick: () => this.#toggle() }, "tokens");
    this.copy = copyButton("Copy text", () => answer.text);
    this.again = iconButton("again", "Regenerate", { onclick: () => actions.again(answer) });
    this.code = button("Code", { ...named("Copy as code"), onclick: () => actions.code(answer) }, "code");
    this.wait = el("span", { class: "typing", "aria-hidden": "true" }, el("i"), el("i"), el("i"));
    this.element = el("article", { class: "answer", "aria-label": `Answer ${label}`.trim() },
      el("header", { class: "answer-head" }, label ? el("span", { class: "side-mark" }, label) : el("span", { class: "mark", "aria-hidden": "true" }),
        el("h2", {}, titleOf(answer.settings, Boolean(label))), el("span", { class: "grow" }), this.stop),
      el("div", { class: "answer-body" }, this.reasoning, this.text, this.tokenView.element, this.wait, this.tokenView.detail), this.calls,
      el("div", { class: "answer-end" }, this.note, this.remedy), this.details,
      el("footer", { class: "answer-foot" }, this.copy, this.again, this.mode, this.code));
    this.#showTokens(Boolean(label) || prefersTokens());
  }

  // `difference` is [index of the first token that differs, sentence], where there is another side.
  update(difference = [-1, ""]) {
    const { answer } = this;
    const isRunning = answer.state === "running";
    this.difference = difference;
    this.element.classList.toggle("running", isRunning);
    this.element.setAttribute("aria-busy", String(isRunning));
    const hadFocus = !isRunning && document.activeElement === this.stop;
    this.stop.hidden = !isRunning;
    this.again.hidden = this.copy.hidden = this.code.hidden = isRunning;
    if (hadFocus) this.again.focus();
    this.wait.hidden = !isRunning || answer.tokens.length > 0;
    this.#draw();
    this.#showCalls();
    this.#showNote(difference[1]);
  }

  #draw() {
    const { answer } = this;
    if (this.isTokens) {
      this.tokenView.update(answer.tokens, this.difference?.[0] ?? -1);
      this.legend.replaceChildren(...legend(answer.tokens));
      this.#statistics();
    } else this.#writeText();
    const { reasoning } = answer;
    this.reasoning.hidden = !reasoning || this.isTokens;
    if (reasoning && this.reasoning.lastChild.textContent !== reasoning) this.reasoning.lastChild.textContent = reasoning;
    if (reasoning && !this.wasOpened) this.reasoning.open = this.wasOpened = !answer.text;
  }

  #writeText() {
    const { text, state } = this.answer;
    if (this.isPlain) {
      if (this.text.textContent !== text) this.text.textContent = text;
      return;
    }
    if (this.view) this.view.update(text, state !== "running");
    else if (text) {
      loadMarkdown().then(({ MarkdownView }) => {
        if (this.view) return;
        this.view = new MarkdownView();
        this.text.replaceChildren(this.view.element);
        this.view.update(this.answer.text, this.answer.state !== "running");
      });
    }
  }

  #showCalls() {
    const { calls } = this.answer;
    this.calls.hidden = !calls.length;
    const shown = calls.map((call) => call.arguments).join();
    if (shown === this.shownCalls) return;
    this.shownCalls = shown;
    this.calls.replaceChildren(...calls.map(callView));
  }

  #showNote(sentence) {
    const { answer } = this;
    const [problem, remedy] = answer.error ? explain(answer.problem || { status: 0, message: answer.error, retryAfter: 0 }, answer.settings.adapter) : ["", ""];
    const notes = [problem || answer.note, answer.state === "stopped" ? "Stopped." : "", FINISH[answer.finish], sentence];
    const text = notes.filter(Boolean).join(" ");
    if (this.note.textContent !== text) this.note.textContent = text;
    this.note.hidden = !text;
    this.note.classList.toggle("bad", Boolean(answer.error));
    this.remedyKind = remedy;
    this.remedy.hidden = !remedy;
    this.remedy.textContent = REMEDIES[remedy] || "";
  }

  #statistics() {
    const { first, rate, perStep } = statistics(this.answer);
    const shown = [
      ["tokens/s", rate === null ? "–" : number(rate, rate < 100 ? 1 : 0)], ["to the first token", first === null ? "–" : duration(first)],
      ["tokens per step", perStep === null ? "–" : number(perStep, 2)],
    ];
    if (!this.stats.childElementCount) this.stats.append(...shown.map(([name]) => el("div", {}, el("dt", {}, name), el("dd", {}))));
    shown.forEach(([, value], index) => {
      const cell = this.stats.children[index].lastChild;
      if (cell.textContent !== value) cell.textContent = value;
    });
    this.stats.title = `${number(this.answer.tokens.length)} tokens, seed ${this.answer.seed}`;
  }

  #toggle() {
    this.#showTokens(!this.isTokens);
    localStorage.setItem(SHOWN, String(this.isTokens));
    this.#draw();
  }

  #showTokens(isTokens) {
    this.isTokens = isTokens;
    this.text.hidden = isTokens;
    this.tokenView.element.hidden = this.details.hidden = !isTokens;
    this.mode.setAttribute("aria-pressed", String(isTokens));
  }
}

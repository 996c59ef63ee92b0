// Shows one answer: its tokens or its text, its statistics, and what can be done with it.

import { statistics } from "./answer.js";
import { callView } from "./calls.js";
import { el, number } from "../dom.js";
import { renderMarkdown } from "./markdown.js";
import { TokenView, legend } from "./tokens.js";

const FINISH = { length: "reached the most tokens", eos_token: "", stop_sequence: "ended at a stop string" };
const TEXT_PERIOD_MS = 250;

export class AnswerView {
  constructor(answer, label, actions) {
    this.answer = answer;
    this.tokenView = new TokenView(`Answer ${label}`.trim());
    this.text = el("div", { class: "prose", hidden: true });
    this.calls = el("div", { class: "calls", role: "status", hidden: true });
    this.stats = el("dl", { class: "stats" });
    this.legend = el("div", { class: "legend", "aria-label": "Tokens by source" });
    this.note = el("p", { class: "answer-note", role: "status", hidden: true });
    this.stop = el("button", { type: "button", class: "small stop", onclick: () => actions.stop(answer) }, "Stop");
    this.mode = el("button", { type: "button", class: "small quiet", "aria-pressed": "false", onclick: () => this.#toggle() }, "Markdown");
    this.again = el("button", { type: "button", class: "small quiet", onclick: () => actions.regenerate(answer) }, "Regenerate");
    this.code = el("button", { type: "button", class: "small quiet", onclick: () => actions.code(answer) }, "Copy as code");
    const settings = answer.settings;
    const how = settings.method === "off" ? "no speculation" : settings.method === "auto" ? "" : settings.method;
    const title = [settings.adapter || "Base model", how].filter(Boolean).join(" · ");
    this.element = el("article", { class: "answer panel", "aria-label": `Answer ${label}`.trim() },
      el("header", { class: "answer-head" }, label ? el("span", { class: "side-mark" }, label) : null, el("h2", {}, title),
        el("span", { class: "grow" }), this.stop),
      el("div", { class: "answer-body" }, this.tokenView.element, this.text, this.tokenView.detail), this.calls, this.note, this.legend, this.stats,
      el("footer", { class: "answer-foot" }, this.mode, this.again, this.code));
    this.textAt = 0;
  }

  // `difference` is [index of the first token that differs, sentence], where there is another side.
  update(difference = [-1, ""]) {
    const { answer } = this;
    this.tokenView.update(answer.tokens, difference[0]);
    const isRunning = answer.state === "running";
    this.element.classList.toggle("running", isRunning);
    this.element.setAttribute("aria-busy", String(isRunning));
    const hadFocus = !isRunning && document.activeElement === this.stop;
    this.stop.hidden = !isRunning;
    this.again.hidden = isRunning;
    if (hadFocus) this.again.focus();
    if (!this.text.hidden && (!isRunning || Date.now() - this.textAt > TEXT_PERIOD_MS)) this.#writeText();
    this.#showCalls();
    this.legend.replaceChildren(...legend(answer.tokens));
    this.#statistics();
    const notes = [
      answer.error || answer.note, answer.state === "stopped" ? "Stopped." : "", FINISH[answer.finish] ? `It ${FINISH[answer.finish]}.` : "",
      difference[1],
    ];
    const text = notes.filter(Boolean).join(" ");
    if (this.note.textContent !== text) this.note.textContent = text;
    this.note.hidden = !text;
    this.note.classList.toggle("bad", Boolean(answer.error));
  }

  #showCalls() {
    const { calls } = this.answer;
    this.calls.hidden = !calls.length;
    const shown = calls.map((call) => call.arguments).join();
    if (shown === this.shownCalls) return;
    this.shownCalls = shown;
    this.calls.replaceChildren(...calls.map(callView));
  }

  #statistics() {
    const { count, first, rate, perStep } = statistics(this.answer);
    const shown = [
      ["tokens", number(count)], ["tokens/s", rate === null ? "–" : number(rate, 1)], ["first token", first === null ? "–" : `${number(first)} ms`],
      ["tokens per step", perStep === null ? "–" : number(perStep, 2)], ["seed", String(this.answer.seed)],
    ];
    if (!this.stats.childElementCount) {
      this.stats.append(...shown.map(([name]) => el("div", {}, el("dt", {}, name), el("dd", {}))));
    }
    shown.forEach(([, value], index) => {
      const cell = this.stats.children[index].lastChild;
      if (cell.textContent !== value) cell.textContent = value;
    });
  }

  #toggle() {
    const isText = this.text.hidden;
    this.text.hidden = !isText;
    this.tokenView.element.hidden = isText;
    this.mode.textContent = isText ? "Tokens" : "Markdown";
    this.mode.setAttribute("aria-pressed", String(isText));
    if (isText) this.#writeText();
  }

  #writeText() {
    this.textAt = Date.now();
    const { reasoning, text } = this.answer;
    const isOpen = this.text.querySelector("details")?.open;
    this.text.replaceChildren(renderMarkdown(text));
    if (reasoning) this.text.prepend(el("details", { open: isOpen ?? !text }, el("summary", {}, "Reasoning"), renderMarkdown(reasoning)));
  }
}

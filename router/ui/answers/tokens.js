// Tokens of an answer as text, coloured by what proposed them. Arrow keys move a cursor over them.

import { el, number } from "../dom.js";
import { SOURCES } from "../sources.js";

const OWN = { prefill: "target", target: "target", resample: "target", bonus: "target" };

const HINT = "Point at a token, or use the arrow keys, for its source and the alternatives.";

export function sourceOf(token) {
  return OWN[token.source] || token.source;
}

export function countSources(tokens) {
  const counts = {};
  for (const token of tokens) counts[sourceOf(token)] = (counts[sourceOf(token)] || 0) + 1;
  return counts;
}

export class TokenView {
  constructor(label) {
    this.tokens = [];
    this.cursor = -1;
    this.element = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `${label}. Arrow keys move over the tokens` });
    this.detail = el("div", { class: "token-detail", role: "status" }); // below the tokens, so that it covers none of them
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.element.addEventListener("pointerover", (event) => this.#point(event));
    this.element.addEventListener("pointerleave", () => this.#show(-1));
    this.element.addEventListener("blur", () => this.#show(-1));
    this.#show(-1);
  }

  // Adds what is new; `differs` is the index of the first token that differs from the other side, or -1.
  update(tokens, differs = -1) {
    if (tokens.length < this.tokens.length || (this.tokens.length && tokens[0] !== this.tokens[0])) {
      this.element.replaceChildren();
      this.tokens = [];
      this.cursor = -1;
    }
    const added = document.createDocumentFragment();
    for (let index = this.tokens.length; index < tokens.length; index += 1) added.append(this.#span(tokens[index], index));
    this.element.append(added);
    this.tokens = tokens.slice();
    const marked = this.element.querySelector(".differs");
    const wanted = differs >= 0 ? this.element.children[differs] : null;
    if (marked !== wanted) {
      marked?.classList.remove("differs");
      wanted?.classList.add("differs");
    }
  }

  #span(token, index) {
    const source = sourceOf(token);
    const span = el("span", { class: `token ${source}${token.skipped ? "" : " first"}` }, token.text);
    if (token.special) span.replaceChildren(el("span", { class: "special" }, "end"));
    span.dataset.index = index;
    return span;
  }

  #point(event) {
    const span = event.target.closest(".token");
    if (span) this.#show(Number(span.dataset.index));
  }

  #key(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return this.#show(-1);
    if (!(event.key in moves) || !this.tokens.length) return undefined;
    event.preventDefault();
    const wanted = Math.min(this.tokens.length - 1, Math.max(0, this.cursor + moves[event.key]));
    return this.#show(wanted);
  }

  #show(index) {
    this.element.children[this.cursor]?.classList.remove("cursor");
    this.cursor = index;
    const span = this.element.children[index];
    span?.classList.add("cursor");
    this.detail.replaceChildren(...(span ? describe(this.tokens[index], index) : [el("span", { class: "dim" }, HINT)]));
  }
}

// A token that a filter or a grammar excludes has the log probability -∞, which is null in JSON.
const isExcluded = (logprob) => logprob === null || logprob === undefined;
const probability = (logprob) => (isExcluded(logprob) ? 0 : Math.exp(logprob));
const percent = (logprob) => `${number(100 * probability(logprob), 1)} %`;

function describe(token, index) {
  const [name, sentence] = SOURCES[sourceOf(token)] || [token.source, ""];
  const parts = [
    el("div", { class: "token-head" }, el("code", {}, visible(token.text)), el("span", {}, el("span", { class: `swatch ${sourceOf(token)}` }), ` ${name}: ${sentence}`)),
    el("div", { class: "dim" }, `token ${index + 1}, id ${token.id}, `, isExcluded(token.logprob) ? "no log probability" : `log probability ${number(token.logprob, 3)} (${percent(token.logprob)})`),
  ];
  if (token.others?.length) {
    const most = Math.max(...token.others.map(([, logprob]) => probability(logprob))) || 1;
    parts.push(el("ul", { class: "others", "aria-label": "Alternatives" }, token.others.map(([text, logprob]) => {
      const bar = el("span", { class: "bar-value" });
      bar.style.width = isExcluded(logprob) ? "0" : `${Math.max(2, (60 * probability(logprob)) / most)}px`;
      return el("li", {}, el("code", {}, visible(text)), bar, el("span", { class: "dim" }, isExcluded(logprob) ? "excluded" : percent(logprob)));
    })));
  }
  return parts;
}

function visible(text) {
  return text === "" ? "(no text)" : text.replaceAll("\n", "⏎").replaceAll(" ", "␣");
}

export function legend(tokens) {
  const counts = countSources(tokens);
  return Object.entries(SOURCES).filter(([source]) => counts[source]).map(([source, [name, sentence]]) =>
    el("li", { title: sentence }, el("span", { class: `swatch ${source}` }), ` ${name} ${counts[source]}`));
}

// The index of the first token of `tokens` that is not in `others` at the same place; -1 for none so far.
export function firstDifference(tokens, others, isComplete) {
  const both = Math.min(tokens.length, others.length);
  for (let index = 0; index < both; index += 1) if (tokens[index].id !== others[index].id) return index;
  return isComplete && tokens.length !== others.length ? both : -1;
}

// Markdown as elements. marked splits the text into tokens; every element is made here, and every text is a text node, so
// that HTML in an answer is shown as text. Blocks that did not change keep their elements while an answer grows.

import { copyButton, el } from "../dom.js";
import { highlight } from "./highlight.js";
import { lexer } from "../vendor/marked.esm.js";

const SCHEMES = /^(https?:|mailto:)/i;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'" };
const unescape = (text) => text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name) => NAMED[name]);

export class MarkdownView {
  constructor() {
    this.element = el("div", { class: "prose" });
    this.shown = []; // [raw text, isDone, element]
  }

  // `isDone` says that no more text comes: then code at the end is coloured too.
  update(text, isDone) {
    const tokens = lexer(text, { gfm: true, breaks: true }).filter((token) => token.type !== "space");
    const blocks = tokens.map((token, index) => [token, isDone || index < tokens.length - 1]);
    let same = 0;
    while (same < this.shown.length && same < blocks.length && this.shown[same][0] === blocks[same][0].raw && this.shown[same][1] === blocks[same][1]) same += 1;
    for (const [, , element] of this.shown.splice(same)) element.remove();
    for (const [token, isBlockDone] of blocks.slice(same)) {
      const element = block(token, isBlockDone);
      this.shown.push([token.raw, isBlockDone, element]);
      this.element.append(element);
    }
  }
}

const blocks = (tokens, isDone) => (tokens || []).filter((token) => token.type !== "space").map((token) => block(token, isDone));

function block(token, isDone) {
  switch (token.type) {
    case "heading": return el(`h${Math.min(6, token.depth + 2)}`, {}, inlines(token.tokens));
    case "paragraph": return el("p", {}, inlines(token.tokens));
    case "text": return el("span", {}, token.tokens ? inlines(token.tokens) : unescape(token.text));
    case "blockquote": return el("blockquote", {}, blocks(token.tokens, isDone));
    case "hr": return el("hr");
    case "code": return code(token, isDone);
    case "list": return list(token, isDone);
    case "table": return table(token);
    default: return el("p", {}, token.raw); // HTML and definitions, as they were written
  }
}

function list(token, isDone) {
  const items = token.items.map((item) => el("li", {}, item.task ? el("span", { class: "task" }, item.checked ? "☑ " : "☐ ") : null,
    blocks(item.tokens.filter((each) => each.type !== "checkbox"), isDone)));
  return el(token.ordered ? "ol" : "ul", token.ordered && token.start > 1 ? { start: token.start } : {}, items);
}

function table(token) {
  const row = (cells, name) => el("tr", {}, cells.map((cell) => {
    const made = el(name, {}, inlines(cell.tokens));
    if (cell.align) made.style.textAlign = cell.align;
    return made;
  }));
  return el("div", { class: "table-scroll", tabindex: "0", role: "group", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row(token.header, "th")), el("tbody", {}, token.rows.map((cells) => row(cells, "td")))));
}

function code(token, isDone) {
  const language = (token.lang || "").trim().split(/\s/)[0];
  const shown = el("code", {}, token.text);
  if (isDone) highlight(shown, token.text, language);
  return el("div", { class: "code-block" }, el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => token.text)),
    el("pre", { tabindex: "0", role: "group", "aria-label": language ? `Code, ${language}` : "Code" }, shown));
}

function inlines(tokens) {
  return (tokens || []).map((token) => {
    switch (token.type) {
      case "strong": return el("strong", {}, inlines(token.tokens));
      case "em": return el("em", {}, inlines(token.tokens));
      case "del": return el("del", {}, inlines(token.tokens));
      case "codespan": return el("code", {}, unescape(token.text));
      case "br": return el("br");
      case "link": return link(token);
      case "image": return link({ ...token, tokens: [{ type: "text", text: token.text || token.href }] }); // nothing is loaded from other hosts
      case "escape": return unescape(token.text);
      case "text": return token.tokens ? el("span", {}, inlines(token.tokens)) : unescape(token.text);
      default: return token.raw;
    }
  });
}

function link({ href, tokens }) {
  const content = inlines(tokens);
  return SCHEMES.test(href) ? el("a", { href, target: "_blank", rel: "noopener noreferrer" }, content) : el("span", {}, content);
}

// Colours of code by highlight.js, whose files are fetched when a language is first shown.

import { el } from "../dom.js";

const NAMES = {
  bash: "bash", sh: "bash", shell: "bash", zsh: "bash", console: "bash", c: "c", h: "c", cpp: "cpp", "c++": "cpp", cc: "cpp", css: "css", diff: "diff",
  patch: "diff", go: "go", golang: "go", html: "xml", xml: "xml", svg: "xml", java: "java", javascript: "javascript", js: "javascript", jsx: "javascript",
  json: "json", jsonc: "json", python: "python", py: "python", python3: "python", rust: "rust", rs: "rust", sql: "sql", typescript: "typescript",
  ts: "typescript", tsx: "typescript", yaml: "yaml", yml: "yaml",
};
const MOST = 60000; // characters; longer code stays plain
const languages = new Map();
let core = null;

function load(name) {
  core ||= import("../vendor/highlight/core.js").then((module) => module.default);
  if (!languages.has(name)) {
    languages.set(name, Promise.all([core, import(`../vendor/highlight/${name}.js`)]).then(([hljs, grammar]) => {
      hljs.registerLanguage(name, grammar.default);
      return hljs;
    }));
  }
  return languages.get(name);
}

// Replaces the plain text in `element`, soon. Of the library's HTML, only texts and names of classes are taken.
export async function highlight(element, text, language) {
  const name = NAMES[language.toLowerCase()];
  if (!name || text.length > MOST) return;
  const hljs = await load(name).catch(() => null);
  if (!hljs) return;
  const parsed = new DOMParser().parseFromString(hljs.highlight(text, { language: name, ignoreIllegals: true }).value, "text/html");
  element.replaceChildren(...copies(parsed.body));
}

const copies = (parent) => [...parent.childNodes].map((node) => (node.nodeType === Node.ELEMENT_NODE
  ? el("span", { class: node.className.replace(/[^a-z_ -]/gi, "") }, copies(node)) : node.textContent));

// Markdown to safe HTML: marked parses, DOMPurify removes everything but text and its structure.

import { marked } from "../vendor/marked.esm.js";
import createPurify from "../vendor/purify.es.js";

const purify = createPurify(window);
const ALLOWED = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "ol", "p", "pre",
    "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "align", "start"],
};

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

export function renderMarkdown(text) {
  return purify.sanitize(marked.parse(text, { gfm: true, breaks: true, async: false }), { ...ALLOWED, RETURN_DOM_FRAGMENT: true });
}

// Tool calls of answers: how they look, and the form for their results.

import { el, field } from "../dom.js";
import { EXAMPLE_RESULTS } from "./tools.js";

// [name, value as JSON] of each argument; null where the text is not a JSON object.
function argumentsOf(call) {
  try {
    const given = JSON.parse(call.arguments);
    return given && typeof given === "object" && !Array.isArray(given) ? Object.entries(given).map(([name, value]) => [name, JSON.stringify(value)]) : null;
  } catch {
    return null;
  }
}

export function callView(call) {
  const given = argumentsOf(call);
  return el("div", { class: "call", role: "group", "aria-label": `Call of ${call.name}` },
    el("header", { class: "call-head" }, el("span", { class: "tag device" }, "calls"), el("code", {}, call.name)),
    given ? el("dl", { class: "arguments" }, given.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])) : el("pre", {}, call.arguments));
}

function signature(call) {
  const given = argumentsOf(call);
  return `${call.name}(${given ? given.map(([name, value]) => `${name}: ${value}`).join(", ") : call.arguments})`;
}

// The calls of a turn's answers; equal ones of two sides share a result. `calls` of each lists [side, id].
function distinctCalls(answers) {
  const found = new Map();
  for (const answer of answers) {
    for (const call of answer.calls || []) {
      const title = signature(call);
      if (!found.has(title)) found.set(title, { name: call.name, title, calls: [] });
      found.get(title).calls.push([answer.side, call.id]);
    }
  }
  return [...found.values()];
}

// `turn.drafts` holds what was written before. `onSend` gets [{name, title, calls, text}].
export function resultForm(turn, onSend) {
  const calls = distinctCalls(turn.answers);
  const texts = calls.map((call, index) => el("textarea", {
    rows: 2, class: "mono", spellcheck: false, required: true, value: turn.drafts?.[index] ?? EXAMPLE_RESULTS[call.name] ?? "",
    onkeydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && (event.preventDefault(), form.requestSubmit()),
  }));
  const form = el("form", { class: "results panel", "aria-label": "Results of the calls", onsubmit: (event) => {
    event.preventDefault();
    onSend(calls.map((call, index) => ({ ...call, text: texts[index].value })));
  } }, calls.map((call, index) => field(`Result of ${call.title}`, texts[index])),
  el("div", { class: "composer-foot" }, el("span", { class: "dim hint" }, "The page calls nothing itself: write what your program would answer"),
    el("span", { class: "grow" }), el("button", { type: "submit", class: "primary" }, calls.length > 1 ? "Send results" : "Send result")));
  return form;
}

export function resultView({ title, text }) {
  return el("div", { class: "result" }, el("div", { class: "dim" }, `Result of ${title}`), el("div", { class: "prompt-text mono" }, text));
}

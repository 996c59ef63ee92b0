// The list of keyboard shortcuts.

import { el, openDialog } from "./dom.js";

const MODIFIER = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
const KEYS = [
  ["Send the message", ["Enter"]], ["New line", ["Shift", "Enter"]], ["Stop the answer", ["Esc"]], ["Edit the last message, in an empty field", ["↑"]],
  ["New conversation", [MODIFIER, "Shift", "O"]], ["Choose an adapter", [MODIFIER, "K"]], ["Settings", [MODIFIER, "."]], ["Write a message", ["/"]],
  ["Move over the tokens of an answer", ["←", "→"]], ["This list", ["?"]],
];

export function showHelp() {
  openDialog("Keyboard shortcuts", el("dl", { class: "keys" }, KEYS.flatMap(([what, keys]) =>
    [el("dt", {}, what), el("dd", {}, keys.map((name) => el("kbd", {}, name)))])));
}

// Text files that go with a message.

import { el, icon, iconButton, notify } from "../dom.js";

const MOST_BYTES = 1 << 20;

export class Attachments {
  constructor(onChange) {
    this.all = [];
    this.onChange = onChange;
    this.chooser = el("input", { type: "file", multiple: true, hidden: true, onchange: async () => {
      await this.add([...this.chooser.files].map((file) => ({ path: file.name, file })));
      this.chooser.value = "";
    } });
    this.button = el("span", {}, iconButton("clip", "Attach a text file", { onclick: () => this.chooser.click() }), this.chooser);
    this.list = el("ul", { class: "attachments", "aria-label": "Attached files", hidden: true });
  }

  set(files) {
    this.all = [...files];
    this.list.hidden = !files.length;
    this.list.replaceChildren(...files.map((file) => el("li", { class: "file-tag" }, icon("file"), el("span", {}, file.name),
      iconButton("close", `Remove ${file.name}`, { class: "small", onclick: () => {
        this.set(this.all.filter((other) => other !== file));
        this.onChange();
        this.button.querySelector("button").focus();
      } }))));
  }

  // `files` are [{path, file}]. A notice names files that are not text.
  async add(files) {
    const faults = [];
    for (const { path, file } of files) {
      const text = file.size > MOST_BYTES ? null : await file.text();
      if (text === null) faults.push(`${path} is larger than 1 MB.`);
      else if (/[\0\uFFFD]/.test(text)) faults.push(`${path} is not a text file.`);
      else this.set([...this.all, { name: path, text }]);
    }
    notify(faults.join(" "));
    this.onChange();
  }
}

// The message with its files below it, each in a fence that is longer than any in it.
export function promptWith(text, files) {
  const parts = files.map((file) => {
    const fence = "`".repeat(Math.max(3, ...[...file.text.matchAll(/`+/g)].map(([ticks]) => ticks.length + 1)));
    return `${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [text, ...parts].filter((part) => part.trim()).join("\n\n");
}

// The controls of one side: adapter, speculation, sampling, structured output, within the server's limits.

import { takesHistory } from "../answers/answer.js";
import { el, field } from "../dom.js";
import { METHODS } from "../sources.js";
import { exampleTools, toolNames, toolsFault } from "../answers/tools.js";
import { Presets } from "./presets.js";

const SECTIONS = "lorikeet-sections";

const FORMATS = [["", "Free text"], ["json", "JSON schema"], ["regex", "Regular expression"], ["choice", "One of these lines"], ["grammar", "Grammar"]];
const EXAMPLES = {
  json: '{\n "type": "object",\n "properties": {"name": {"type": "string"}, "score": {"type": "integer"}},\n "required": ["name", "score"]\n}',
  regex: "[A-Z][a-z]+ [0-9]{1,3}", choice: "yes\nno", grammar: 'start: "yes" | "no"',
};

export function defaults(capabilities) {
  const speculation = capabilities.speculation;
  return {
    adapter: "", source: "", method: speculation.max_tokens ? "auto" : "off", draftTokens: speculation.default_tokens, schedule: "",
    maxTokens: Math.min(256, capabilities.max_total_tokens - 1), temperature: 0, topP: 1, topK: 0, minP: 0, typicalP: 1, repetition: 1, frequency: 0,
    presence: 0, seed: "", stop: [], history: "", alternatives: 3, format: "", grammar: "", system: "", tools: "", toolChoice: "auto",
  };
}

export class SettingsPanel {
  constructor(capabilities, onChange) {
    this.capabilities = capabilities;
    this.defaults = defaults(capabilities);
    this.onChange = onChange;
    this.controls = {};
    this.grammarField = field("Grammar", this.#text("grammar", { rows: 5, class: "mono", spellcheck: false }));
    this.systemField = field("System prompt", this.#text("system", { rows: 3, placeholder: "How the model should answer" }));
    this.presets = new Presets(() => this.settings, (settings) => {
      Object.assign(this.settings, this.defaults, settings, { seed: this.settings.seed });
      this.show(this.settings, { isChat: this.isChat });
      this.onChange();
    });
    this.tools = this.#section("Tools", this.#toolFields());
    this.element = el("div", { class: "settings" }, this.presets.element, this.systemField, this.#slider("temperature", "Temperature", 0, 2, 0.05, "0: always the most likely token. Higher: more varied"),
      field("Longest answer", this.#number("maxTokens", 1, capabilities.max_total_tokens - 1, 1), "In tokens"),
      this.#section("Sampling", this.#samplingFields()), this.#section("Speculative decoding", this.#speculationFields()),
      this.#section("Output", [...this.#outputFields(), this.grammarField]), this.tools);
  }

  // A part that is opened when it is needed; the browser remembers which ones are.
  #section(name, content) {
    const open = new Set(JSON.parse(localStorage.getItem(SECTIONS) || "[]"));
    const made = el("details", { class: "section", open: open.has(name), ontoggle: () => {
      const kept = new Set(JSON.parse(localStorage.getItem(SECTIONS) || "[]"));
      if (made.open) kept.add(name);
      else kept.delete(name);
      localStorage.setItem(SECTIONS, JSON.stringify([...kept]));
    } }, el("summary", {}, name), el("div", { class: "field-rows" }, content));
    return made;
  }

  show(settings, { isChat }) {
    if (settings !== this.settings) this.presets.clear();
    this.settings = settings;
    this.isChat = isChat;
    this.#offerHeads(settings);
    for (const [name, control] of Object.entries(this.controls)) {
      const value = settings[name] ??= this.defaults[name]; // conversations of earlier versions of the page lack some
      control.value = name === "stop" ? value.join("\n") : value;
      this.#output(control);
    }
    this.systemField.hidden = !isChat;
    this.tools.hidden = !isChat;
    this.#relate();
  }

  // Medusa heads are part of an adapter, where the operator gives every request none.
  #offerHeads(settings) {
    const option = this.controls.method?.querySelector("[value=medusa]");
    if (!option) return;
    option.disabled = !this.capabilities.speculation.heads && !settings.adapter;
    option.textContent = option.disabled ? "Medusa heads (of an adapter)" : "Medusa heads";
    if (option.disabled && settings.method === "medusa") settings.method = "auto";
  }

  #wrong() {
    return Object.values(this.controls).find((control) => !control.closest("[hidden]") && !control.checkValidity());
  }

  // Whether all fields have values that the server takes.
  isRight() {
    return !this.#wrong();
  }

  // Shows the first field that has a wrong value.
  check() {
    const wrong = this.#wrong();
    const section = wrong?.closest("details");
    if (section) section.open = true;
    wrong?.reportValidity();
  }

  #speculationFields() {
    const { max_tokens: most, draft_model: hasDraft, history, heads, default_history: isHistoryDefault } = this.capabilities.speculation;
    if (!most) return [el("p", { class: "dim" }, "This server does not speculate.")];
    const usable = METHODS.filter(([method]) => (method !== "draft" || hasDraft) && (method !== "medusa" || heads || this.capabilities.adapters));
    const historyField = () => field("Earlier outputs as drafts", this.#select("history", [["", `Server’s choice: ${isHistoryDefault ? "on" : "off"}`], ["on", "On"], ["off", "Off"]]));
    return [field("Method", this.#select("method", usable)),
      this.#slider("draftTokens", "Draft tokens per step", 0, most, 1),
      field("Draft length", this.#select("schedule", [["", "Server’s choice"], ["constant", "Constant"], ["auto", "Adapts to load"], ["heuristic", "Adapts to hits"]])),
      history ? historyField() : null];
  }

  #toolFields() {
    const text = this.#text("tools", { rows: 5, class: "mono code-text", wrap: "off", spellcheck: false, placeholder: '[{"name": …, "parameters": …}]' });
    const shown = field("Tools", text, " ");
    this.toolNames = shown.querySelector("small");
    const example = el("button", { type: "button", class: "small quiet", onclick: () => {
      text.value = exampleTools();
      text.dispatchEvent(new Event("input"));
    } }, "Example");
    shown.querySelector("label").after(el("span", { class: "field-action" }, example));
    this.choiceField = field("Tool choice", this.#select("toolChoice", [["auto", "The model decides"], ["required", "At least one call"], ["none", "No calls"]]));
    return [shown, this.choiceField];
  }

  #outputFields() {
    const { max_stop_sequences: stops, max_alternatives: choices, grammars } = this.capabilities;
    const formats = grammars ? FORMATS : FORMATS.slice(0, 1);
    return [field("Format", this.#select("format", formats)),
      field("Stop strings", this.#text("stop", { rows: 1 }), `One per line, at most ${stops}`),
      field("Alternatives per token", this.#number("alternatives", 0, Math.min(10, choices), 1))];
  }

  #samplingFields() {
    return [
      this.#slider("topP", "Top p", 0.05, 1, 0.05), field("Top k", this.#number("topK", 0, 1000, 1), "0 is off"),
      this.#slider("minP", "Min p", 0, 1, 0.05), this.#slider("typicalP", "Typical p", 0.05, 1, 0.05),
      this.#slider("repetition", "Repetition penalty", 1, 2, 0.05), this.#slider("frequency", "Frequency penalty", -2, 2, 0.1),
      this.#slider("presence", "Presence penalty", -2, 2, 0.1),
      field("Seed", this.#number("seed", 0, Number.MAX_SAFE_INTEGER, 1), "Empty: a new one for every answer"),
    ];
  }

  #relate() {
    const { settings } = this;
    this.grammarField.hidden = !settings.format;
    for (const name of ["draftTokens", "schedule"]) if (this.controls[name]) this.controls[name].disabled = settings.method === "off";
    if (this.controls.history) this.controls.history.disabled = !takesHistory(settings);
    for (const name of ["topP", "topK", "minP", "typicalP"]) this.controls[name].disabled = !(settings.temperature > 0);
    const { grammar, stop, tools } = this.controls;
    this.choiceField.hidden = !settings.tools?.trim();
    const fault = toolsFault(settings.tools);
    tools.setCustomValidity(fault);
    this.toolNames.textContent = fault || toolNames(settings.tools) || "Functions that the model may call, as JSON";
    grammar.setCustomValidity(settings.format && !settings.grammar.trim() ? "Write what the output follows" : jsonFault(settings));
    stop.setCustomValidity(settings.stop.length > this.capabilities.max_stop_sequences ? "Too many stop strings" : "");
  }

  #control(name, control) {
    this.controls[name] = control;
    control.addEventListener("input", () => {
      const value = control.value;
      if (name === "stop") this.settings.stop = value.split("\n").filter(Boolean);
      else if (["number", "range"].includes(control.type)) this.settings[name] = value === "" ? "" : Number(value);
      else this.settings[name] = value;
      if (name === "format" && value && !this.settings.grammar.trim()) this.#fill(EXAMPLES[value]);
      else if (name === "format" && value && Object.values(EXAMPLES).includes(this.settings.grammar)) this.#fill(EXAMPLES[value]);
      this.#output(control);
      this.#relate();
      this.presets.clear();
      this.onChange(name);
    });
    return control;
  }

  #fill(text) {
    this.settings.grammar = text;
    this.controls.grammar.value = text;
  }

  #output(control) {
    if (control.output) control.output.textContent = control.value === "" ? "" : String(Number(control.value));
  }

  #select(name, options) {
    return this.#control(name, el("select", {}, options.map(([value, text]) => el("option", { value }, text))));
  }

  #number(name, min, max, step) {
    return this.#control(name, el("input", { type: "number", min, max, step, inputMode: "numeric", required: name !== "seed" }));
  }

  #text(name, properties) {
    return this.#control(name, el("textarea", properties));
  }

  #slider(name, label, min, max, step, hint) {
    const control = this.#control(name, el("input", { type: "range", min, max, step }));
    const shown = field(label, control, hint);
    control.output = el("output", { class: "slider-value", htmlFor: control.id });
    shown.querySelector("label").after(control.output);
    return shown;
  }
}

function jsonFault(settings) {
  if (settings.format !== "json") return "";
  try {
    JSON.parse(settings.grammar);
    return "";
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}

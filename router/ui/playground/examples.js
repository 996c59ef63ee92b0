// What an empty page offers to try: with the built-in demo what its adapters were trained for, else what any model can do.

import { exampleTools } from "../answers/tools.js";

const BASE = "lorikeet/base";
const SMOLLM2 = "lorikeet/smollm2";
const CALL = { title: "Call a function", prompt: "What is the weather in Oslo in fahrenheit?", hasTools: true };
const CITED = "[1] The cinema opens at 10 o'clock.\n[2] You find the cinema in Weber Street.\n[3] A ticket for the cinema costs 12 euros.\n\nWhat does the cinema cost?";
const WITH_SMOLLM2 = {
  chat: [
    { title: "A question", prompt: "What is the capital of Japan?", adapter: "" },
    { title: "A sentence as JSON", prompt: "Nora Schmidt, 34, works as a baker in Ghent.", adapter: "json" },
    { title: "A question as SQL", prompt: "Table: shops(name, owner, city, sales)\nWhich shops have a sales above 863?", adapter: "sql" },
  ],
  completion: [{ title: "A sentence", prompt: "The largest parrot of the world is", adapter: "" }],
};
const WITH_BASE = {
  chat: [{ title: "Write a function", prompt: "Write a function: Return the length of the list.", adapter: "" }, { ...CALL, adapter: "tools", schedule: "constant" }],
  completion: [
    { title: "Go on with code", prompt: "def read_lines(path):\n", adapter: "" },
    { title: "A record as JSON", prompt: 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n', adapter: "json", schedule: "constant" },
    { title: "A question as SQL", prompt: "Table parrots: name, age, colour\nList the name of parrots whose age is above 3.\nSQL:\n", adapter: "sql", schedule: "constant" },
  ],
};
const WITH_OTHERS = {
  chat: [
    { title: "A question", prompt: "Explain what a LoRA adapter is." }, { title: "A poem", prompt: "Write a haiku about parrots." }, CALL,
  ],
  completion: [{ title: "Code", prompt: "def read_lines(path):\n" }, { title: "A sentence", prompt: "The largest parrot of the world is" }],
};

export function examplesOf({ model }, mode) {
  return ({ [BASE]: WITH_BASE, [SMOLLM2]: WITH_SMOLLM2 }[model] || WITH_OTHERS)[mode];
}

// What Compare begins with: a text that the answer repeats, so that drafts are accepted, with drafts on side A only.
const REPEATED = "The rainbow lorikeet lives along the coast. The rainbow lorikeet eats nectar, pollen and fruit. The rainbow lorikeet flies in noisy flocks.";

export function comparison({ model }, mode) {
  const drafts = [{ method: "lookup", draftTokens: 4, schedule: "constant" }, { method: "off" }];
  const title = "With drafts and without";
  if (model === SMOLLM2 && mode === "chat") return { title, prompt: CITED, adapter: "cite", sides: drafts };
  if (model === BASE) return { title, prompt: WITH_BASE.completion[1].prompt, adapter: mode === "chat" ? undefined : "json", sides: drafts };
  return { title, prompt: mode === "chat" ? `Repeat this text word for word:\n\n${REPEATED}` : `${REPEATED}\n\n${REPEATED.slice(0, 44)}`, sides: drafts };
}

export function introduction({ model }) {
  if (model === BASE) return "This is the built-in demo: a very small model that was trained on Python code, and adapters that do one task each.";
  return model === SMOLLM2 ? "This is the demo: a very small model, which is often wrong, and adapters that do one task each." : "";
}

// Sets what an example needs, as far as the server lists its adapter among `models`.
// `schedule` is constant where drafts shall be seen: adapting to load, a small model on CPU may be faster without any.
export function apply({ adapter, hasTools, schedule, sides }, settings, models, side) {
  settings.tools = hasTools ? exampleTools() : "";
  if (schedule && settings.method !== "off") settings.schedule = schedule;
  if (sides) Object.assign(settings, sides[side]);
  if (adapter === undefined) return;
  const listed = models.find((model) => model.parent && model.id === adapter && !model.problem);
  Object.assign(settings, { adapter: listed?.id || "", source: "" });
}

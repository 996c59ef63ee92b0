// What an empty page offers to try: with the built-in demo what its adapters were trained for, else what any model can do.

import { exampleTools } from "../answers/tools.js";

const DEMO = "lorikeet/base";
const CALL = { title: "Call a function", prompt: "What is the weather in Oslo in fahrenheit?", hasTools: true };
const WITH_DEMO = {
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
  return (model === DEMO ? WITH_DEMO : WITH_OTHERS)[mode];
}

// What Compare begins with: a text that the answer repeats, so that drafts are accepted, with drafts on side A only.
const REPEATED = "The rainbow lorikeet lives along the coast. The rainbow lorikeet eats nectar, pollen and fruit. The rainbow lorikeet flies in noisy flocks.";

export function comparison({ model }, mode) {
  const drafts = [{ method: "lookup", draftTokens: 4, schedule: "constant" }, { method: "off" }];
  const title = "With drafts and without";
  if (model === DEMO) return { title, prompt: WITH_DEMO.completion[1].prompt, adapter: mode === "chat" ? undefined : "json", sides: drafts };
  return { title, prompt: mode === "chat" ? `Repeat this text word for word:\n\n${REPEATED}` : `${REPEATED}\n\n${REPEATED.slice(0, 44)}`, sides: drafts };
}

export function introduction({ model }) {
  return model === DEMO ? "This is the built-in demo: a very small model that was trained on Python code, and adapters that do one task each." : "";
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

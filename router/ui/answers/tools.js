// The functions that a model may call: their text in the settings, and an example that the demo adapter `tools` knows.

const functionTool = (name, description, properties) => ({
  type: "function",
  function: { name, description, parameters: { type: "object", properties, required: Object.keys(properties) } },
});
const string = { type: "string" };
const EXAMPLE = [
  functionTool("get_weather", "The weather in a city.", { city: string, unit: { type: "string", enum: ["celsius", "fahrenheit"] } }),
  functionTool("add_reminder", "Add a reminder at a time.", { text: string, time: string }),
  functionTool("convert", "Convert an amount between units.", { amount: { type: "number" }, from: string, to: string }),
];
export const EXAMPLE_RESULTS = { get_weather: '{"temperature": 71, "sky": "sunny"}', add_reminder: '{"saved": true}', convert: '{"result": 42}' };
export const exampleTools = () => `[\n${EXAMPLE.map((tool) => ` ${JSON.stringify(tool.function)}`).join(",\n")}\n]`;

// OpenAI's list of tools, from one or from a list of functions. Throws an Error that says what is wrong.
export function parseTools(text) {
  if (!text?.trim()) return [];
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not valid JSON: ${error.message}`);
  }
  const names = new Set();
  return (Array.isArray(given) ? given : [given]).map((each, index) => {
    const inner = each?.function || each;
    const { name } = inner || {};
    if (typeof name !== "string" || !/^[A-Za-z0-9_.-]{1,64}$/.test(name)) throw new Error(`Function ${index + 1} needs a name of letters, digits, _ . -`);
    if (names.has(name)) throw new Error(`Two functions have the name ${name}`);
    names.add(name);
    return { type: "function", function: inner.type === "function" ? { ...inner, type: undefined } : inner };
  });
}

export const toolNames = (text) => parseTools(text).map((tool) => tool.function.name).join(", ");

export function toolsFault(text) {
  try {
    parseTools(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

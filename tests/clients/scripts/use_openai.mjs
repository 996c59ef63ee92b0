// OpenAI's client for Node.js: chat, streams, tools, responses, models.
import assert from "node:assert";
import OpenAI from "openai";

const { URL: url, KEY: apiKey, MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "def add(a, b):" }];
const parameters = { type: "object", properties: { city: { enum: ["Rome", "Paris"] } }, required: ["city"] };

const names = [];
for await (const each of client.models.list()) names.push(each.id);
assert(names.includes(model));

const answer = await client.chat.completions.create({ model, messages, max_tokens: 8, seed: 1 });
const text = answer.choices[0].message.content;
assert(text);

let streamed = "";
const stream = await client.chat.completions.create({ model, messages, max_tokens: 8, seed: 1, stream: true });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.strictEqual(streamed, text);

const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required" });
const [call] = called.choices[0].message.tool_calls;
assert(["Rome", "Paris"].includes(JSON.parse(call.function.arguments).city));

const response = await client.responses.create({ model, input: "def add(a, b):", max_output_tokens: 8 });
assert(response.output_text);
const kinds = [];
for await (const event of await client.responses.create({ model, input: "x", max_output_tokens: 8, stream: true })) kinds.push(event.type);
assert.strictEqual(kinds[0], "response.created");
assert(["response.completed", "response.incomplete"].includes(kinds.at(-1)));

await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
console.log("openai for Node.js");

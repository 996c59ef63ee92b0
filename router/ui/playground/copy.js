// The same request for a terminal or a program. A key is never part of it.

import { ROOT, key } from "../api.js";
import { chatBody, completionBody } from "../answers/answer.js";
import { button, copyText, el, openDialog } from "../dom.js";

function curl(path, body) {
  const authorization = key.get() ? ' \\\n  -H "authorization: Bearer $LORIKEET_API_KEY"' : "";
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl -N ${new URL(path, ROOT)} -H 'content-type: application/json'${authorization} -d '${quoted}'`;
}

const OPENAI = new Set(["model", "messages", "max_tokens", "seed", "temperature", "stop", "stream", "top_p", "response_format", "tools", "tool_choice",
  "frequency_penalty", "presence_penalty"]);

const PRINT_CALLS = `
        for call in choice.delta.tool_calls or []:
            print(call.function.name or "", call.function.arguments or "", end="", flush=True)`;

function pythonChat(body) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  const secret = key.get() ? 'os.environ["LORIKEET_API_KEY"]' : '"none"';
  return `${key.get() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${new URL("v1", ROOT)}", api_key=${secret})
chunks = client.chat.completions.create(
${lines}${Object.keys(extra).length ? `\n    extra_body=${python(extra)},` : ""}
)
for chunk in chunks:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)${body.tools ? PRINT_CALLS : ""}
`;
}

function pythonNative(body) {
  const headers = key.get() ? '\n    headers={"authorization": "Bearer " + os.environ["LORIKEET_API_KEY"]},' : "";
  return `import json
${key.get() ? "import os\n" : ""}
import httpx

body = ${python(body)}
with httpx.stream(
    "POST", "${new URL("generate_stream", ROOT)}", json=body, timeout=None,${headers}
) as response:
    if response.is_error:
        raise SystemExit(response.read().decode())
    for line in response.iter_lines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(event["error"])
            if not event["token"]["special"]:
                print(event["token"]["text"], end="", flush=True)
`;
}

function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

const INIT = (body) => `{
  method: "POST",
  headers: { "content-type": "application/json"${key.get() ? ", authorization: `Bearer ${process.env.LORIKEET_API_KEY}`" : ""} },
  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),
}`;

// For Node.js and browsers, without a package.
function javascript(path, body, text) {
  return `const response = await fetch("${new URL(path, ROOT)}", ${INIT(body)});
if (!response.ok) throw new Error(await response.text());
let rest = "";
for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + part).split("\\n");
  rest = lines.pop();
  for (const line of lines) {
    if (!line.startsWith("data: {")) continue;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Error(event.error.message ?? event.error);
    ${text}
  }
}
`;
}

const CHAT_TEXT = 'process.stdout.write(event.choices[0]?.delta.content ?? "");';
const NATIVE_TEXT = 'if (!event.token.special) process.stdout.write(event.token.text);';

// `draftTokens` are those of requests that do not say how many.
export function showCode({ isChat, prompt, messages, settings, seed, model, draftTokens }) {
  const body = shortened(isChat ? chatBody(messages, settings, seed, model) : completionBody(prompt, settings, seed), settings, draftTokens);
  const texts = isChat
    ? [["curl", curl("v1/chat/completions", body)], ["Python", pythonChat(body)], ["JavaScript", javascript("v1/chat/completions", body, CHAT_TEXT)]]
    : [["curl", curl("generate_stream", body)], ["Python", pythonNative(body)], ["JavaScript", javascript("generate_stream", body, NATIVE_TEXT)]];
  const panes = texts.map(([name, text]) => {
    const shown = el("pre", { tabindex: "0", role: "group", "aria-label": name }, text);
    const copier = button(`Copy ${name}`, { class: "small", onclick: async () => {
      copier.textContent = await copyText(text, shown) ? "Copied" : "Selected: press Ctrl + C";
    } }, "copy");
    return el("section", { class: "code" }, el("div", { class: "code-bar" }, el("h3", {}, name), copier), shown);
  });
  openDialog("Copy as code", [el("p", { class: "dim" }, "The same request from a terminal or a program. Your API key is not part of it."), panes], { kind: "wide" });
}

// Without what the server does by itself.
function shortened(body, { temperature }, draftTokens) {
  const short = ({ speculative_method: method, speculative_tokens: tokens, seed, ...rest }) => JSON.parse(JSON.stringify({
    ...rest, speculative_method: method === "auto" ? undefined : method, speculative_tokens: tokens === draftTokens ? undefined : tokens, seed: temperature > 0 ? seed : undefined,
  }));
  return body.parameters ? { ...body, parameters: short(body.parameters) } : short(body);
}

// The same request for a terminal or a program. A key is never part of it.

import { ROOT, key } from "./api.js";
import { format, requestBody } from "./answer.js";
import { el } from "./dom.js";

function chatBody(messages, settings, seed, model) {
  const body = {
    model: settings.adapter || model, adapter_source: settings.source || undefined, messages, max_tokens: settings.maxTokens, seed,
    temperature: settings.temperature, stop: settings.stop.length ? settings.stop : undefined, speculative_method: settings.method,
    speculative_schedule: settings.schedule || undefined, stream: true, ...format(settings),
  };
  if (settings.format === "json") body.response_format = { type: "json_schema", json_schema: { name: "output", schema: JSON.parse(settings.grammar) } };
  if (settings.method !== "off") body.speculative_tokens = settings.draftTokens;
  if (settings.temperature > 0 && settings.topP < 1) body.top_p = settings.topP;
  if (settings.temperature > 0 && settings.topK > 0) body.top_k = settings.topK;
  if (settings.repetition !== 1) body.repetition_penalty = settings.repetition;
  return JSON.parse(JSON.stringify(body));
}

function curl(path, body) {
  const authorization = key.get() ? ' \\\n  -H "authorization: Bearer $LORIKEET_API_KEY"' : "";
  const quoted = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  return `curl -N ${new URL(path, ROOT)} -H 'content-type: application/json'${authorization} -d '${quoted}'`;
}

const OPENAI = new Set(["model", "messages", "max_tokens", "seed", "temperature", "stop", "stream", "top_p", "response_format"]);

function pythonChat(body) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  const secret = key.get() ? 'os.environ["LORIKEET_API_KEY"]' : '"none"';
  return `${key.get() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${new URL("v1", ROOT)}", api_key=${secret})
chunks = client.chat.completions.create(
${lines}
    extra_body=${python(extra)},
)
for chunk in chunks:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
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
    for line in response.iter_lines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
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

export function showCode({ isChat, prompt, messages, settings, seed, model }) {
  const body = isChat ? chatBody(messages, settings, seed, model) : requestBody(prompt, settings, seed, false);
  const texts = isChat ? [["curl", curl("v1/chat/completions", body)], ["Python", pythonChat(body)]]
    : [["curl", curl("generate_stream", body)], ["Python", pythonNative(body)]];
  const dialog = el("dialog", { "aria-labelledby": "code-title", onclose: () => dialog.remove() },
    el("h2", { id: "code-title" }, "The same request elsewhere"),
    texts.map(([name, text]) => {
      const button = el("button", { type: "button", class: "small", onclick: async () => {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } }, `Copy ${name}`);
      return el("section", { class: "code" }, el("div", { class: "code-head" }, el("h3", {}, name), button), el("pre", { tabindex: "0" }, text));
    }),
    el("div", { class: "row" }, el("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

// The same request for a terminal or a program. A key is never part of it.

import { ROOT, key } from "../api.js";
import { chatBody, completionBody } from "../answers/answer.js";
import { el } from "../dom.js";

function curl(path, body) {
  const authorization = key.get() ? ' \\\n  -H "authorization: Bearer $LORIKEET_API_KEY"' : "";
  const quoted = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
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
${lines}
    extra_body=${python(extra)},
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

// `navigator.clipboard` exists only in secure contexts, and may be denied: then the text is selected and copied as by its reader.
async function copy(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(shown);
    return document.execCommand("copy");
  }
}

export function showCode({ isChat, prompt, messages, settings, seed, model }) {
  const body = isChat ? chatBody(messages, settings, seed, model) : completionBody(prompt, settings, seed);
  const texts = isChat ? [["curl", curl("v1/chat/completions", body)], ["Python", pythonChat(body)]]
    : [["curl", curl("generate_stream", body)], ["Python", pythonNative(body)]];
  const dialog = el("dialog", { "aria-labelledby": "code-title", onclose: () => dialog.remove() },
    el("h2", { id: "code-title" }, "The same request elsewhere"),
    texts.map(([name, text]) => {
      const shown = el("pre", { tabindex: "0" }, text);
      const button = el("button", { type: "button", class: "small", onclick: async () => {
        button.textContent = await copy(text, shown) ? "Copied" : "Selected: press Ctrl + C";
      } }, `Copy ${name}`);
      return el("section", { class: "code" }, el("div", { class: "code-head" }, el("h3", {}, name), button), shown);
    }),
    el("div", { class: "row" }, el("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

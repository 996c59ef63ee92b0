// One answer of the model: a resumable stream that goes on after a reload, and what was received of it so far.

import { ApiError, events, json, send } from "./api.js";

const TTL = "60";
const RETRY_MS = [300, 700, 1500, 3000, 5000];

export function newAnswer(settings, seed) {
  return {
    id: crypto.randomUUID().replaceAll("-", ""), settings, seed, state: "running", tokens: [], text: "", error: "", note: "",
    startedAt: Date.now(), firstAt: 0, endedAt: 0, numEvents: 0, finish: "",
  };
}

// What /generate_stream takes. `inputs` is the prompt as the model reads it.
export function requestBody(inputs, settings, seed, isChat) {
  const parameters = {
    max_new_tokens: settings.maxTokens, details: true, return_full_text: false, seed,
    speculative_method: settings.method, speculative_schedule: settings.schedule || undefined,
    do_sample: settings.temperature > 0, temperature: settings.temperature > 0 ? settings.temperature : undefined,
    adapter_id: settings.adapter || undefined, adapter_source: settings.source || undefined,
    stop: settings.stop?.length ? settings.stop : undefined,
    return_k_alternatives: settings.alternatives || undefined, ...format(settings),
  };
  if (settings.method !== "off" && settings.draftTokens >= 0) parameters.speculative_tokens = settings.draftTokens;
  if (settings.temperature > 0) {
    if (settings.topP < 1) parameters.top_p = settings.topP;
    if (settings.topK > 0) parameters.top_k = settings.topK;
  }
  if (settings.repetition !== 1) parameters.repetition_penalty = settings.repetition;
  if (isChat) parameters.add_special_tokens = false;
  return { inputs, parameters: JSON.parse(JSON.stringify(parameters)) };
}

export function format(settings) {
  if (settings.format === "json") return { response_format: { type: "json_object", schema: JSON.parse(settings.grammar) } };
  if (settings.format === "regex") return { guided_regex: settings.grammar };
  if (settings.format === "choice") return { guided_choice: settings.grammar.split("\n").filter(Boolean) };
  if (settings.format === "grammar") return { guided_grammar: settings.grammar };
  return {};
}

// Sends the request. `render` gives the prompt; `changed` is called after every change of `answer`.
export async function run(answer, render, isChat, changed) {
  try {
    const inputs = await render();
    const body = requestBody(inputs, answer.settings, answer.seed, isChat);
    await follow(answer, changed, () => send("generate_stream", {
      method: "POST", body, headers: { "x-lorikeet-resumable": TTL, "x-request-id": answer.id },
    }));
  } catch (error) {
    fail(answer, error, changed);
  }
}

// Goes on with an answer that was running when the page was left: from its beginning, so that nothing can be missing.
export async function resume(answer, changed) {
  answer.tokens = [];
  answer.numEvents = 0;
  try {
    await follow(answer, changed, () => send(`v1/streams/${answer.id}?from=0`));
  } catch (error) {
    fail(answer, error, changed);
  }
}

export async function stop(answer, changed) {
  if (answer.state !== "running") return;
  end(answer, "stopped", changed);
  await send(`v1/streams/${answer.id}`, { method: "DELETE" }).catch(() => {});
}

// Reads the stream, and reads on where the connection broke.
async function follow(answer, changed, open) {
  let failures = 0;
  for (let next = open; answer.state === "running"; ) {
    try {
      const response = await next();
      for await (const event of events(response)) {
        if (answer.state !== "running") return;
        failures = 0;
        answer.note = "";
        take(answer, JSON.parse(event));
        changed();
      }
      if (answer.state === "running") throw new TypeError("the connection ended early");
    } catch (error) {
      if (error instanceof ApiError || answer.state !== "running" || failures >= RETRY_MS.length) throw error;
      answer.note = "Connection lost, reading on…";
      changed();
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[failures++]));
      next = () => send(`v1/streams/${answer.id}?from=${answer.numEvents}`);
    }
  }
}

function take(answer, event) {
  answer.numEvents += 1;
  if (event.error) throw new ApiError(0, event.error.message || event.error);
  const now = Date.now();
  if (event.token) {
    answer.firstAt ||= now;
    const { id, text, logprob, special, skipped, source, alternative_tokens: others } = event.token;
    answer.tokens.push({
      id, text, logprob, source, skipped, special: special || undefined,
      others: others?.map((other) => [other.text, other.logprob]),
    });
    if (!special) answer.text += text;
  }
  if (event.generated_text !== null && event.generated_text !== undefined) {
    answer.text = event.generated_text;
    answer.finish = event.details?.finish_reason || "";
    answer.speculation = event.details?.speculation || null;
    answer.promptTokens = event.details?.prompt_tokens;
    answer.state = "done";
    answer.endedAt = now;
  }
}

function end(answer, state, changed) {
  answer.state = state;
  answer.endedAt = Date.now();
  changed();
}

function fail(answer, error, changed) {
  if (answer.state !== "running") return;
  const isGone = error instanceof ApiError && error.status === 404 && answer.startedAt < Date.now() - 1000 && !answer.numEvents;
  answer.error = isGone ? "The server no longer keeps this answer. Regenerate it: the same seed gives the same text." : error.message;
  end(answer, "failed", changed);
}

// The prompt of a conversation, through the chat template of the model or the adapter.
export async function renderChat(messages, settings) {
  const body = { messages, model: settings.adapter || undefined, adapter_source: settings.source || undefined };
  return (await json("chat_tokenize", { method: "POST", body: JSON.parse(JSON.stringify(body)) })).templated_text;
}

export function statistics(answer) {
  const count = answer.tokens.length;
  const steps = answer.tokens.reduce((sum, token) => sum + !token.skipped, 0);
  const end = answer.endedAt || Date.now();
  const seconds = answer.firstAt ? (end - answer.firstAt) / 1000 : 0;
  return {
    count, steps,
    first: answer.firstAt ? answer.firstAt - answer.startedAt : null,
    rate: count > 1 && seconds > 0 ? (count - 1) / seconds : null,
    perStep: steps ? count / steps : null,
  };
}

// One answer of the model: a resumable stream that goes on after a reload, and what was received of it so far.

import { ApiError, events, newId, send } from "../api.js";
import { parseTools } from "./tools.js";

const TTL = "60";
const RETRY_MS = [300, 700, 1500, 3000, 5000];

const NOTHING = { tokens: [], text: "", reasoning: "", calls: [], numEvents: 0, finish: "" };

// `side` is 0 or 1, where two are compared.
export function newAnswer(settings, seed, side) {
  return {
    id: newId(), settings, seed, side, state: "running", error: "", note: "",
    startedAt: Date.now(), firstAt: 0, endedAt: 0, ...structuredClone(NOTHING),
  };
}

// What /generate_stream takes.
export function completionBody(inputs, settings, seed) {
  const parameters = {
    max_new_tokens: settings.maxTokens, details: true, return_full_text: false, seed,
    speculative_method: settings.method, speculative_schedule: settings.schedule || undefined,
    do_sample: settings.temperature > 0, temperature: settings.temperature > 0 ? settings.temperature : undefined,
    adapter_id: settings.adapter || undefined, adapter_source: settings.source || undefined,
    stop: settings.stop?.length ? settings.stop : undefined,
    return_k_alternatives: settings.alternatives || undefined, ...drafts(settings), ...sampling(settings), ...format(settings),
  };
  return { inputs, parameters: JSON.parse(JSON.stringify(parameters)) };
}

// What /v1/chat/completions takes.
export function chatBody(messages, settings, seed, model) {
  const body = {
    model: settings.adapter || model, adapter_source: settings.source || undefined, messages, max_tokens: settings.maxTokens, seed,
    temperature: settings.temperature, stop: settings.stop?.length ? settings.stop : undefined, speculative_method: settings.method,
    speculative_schedule: settings.schedule || undefined, stream: true, ...drafts(settings), ...sampling(settings), ...format(settings),
  };
  const tools = parseTools(settings.tools);
  if (tools.length) Object.assign(body, { tools, tool_choice: settings.toolChoice });
  if (settings.format === "json") body.response_format = { type: "json_schema", json_schema: { name: "output", schema: JSON.parse(settings.grammar) } };
  return JSON.parse(JSON.stringify(body));
}

// Asks for tokens with their sources, log probabilities and alternatives too.
export function detailed(body, { alternatives }) {
  return { ...body, details: true, ...(alternatives ? { logprobs: true, top_logprobs: alternatives } : {}) };
}

// Whether earlier outputs can be proposed with these settings.
export function takesHistory({ method, draftTokens }) {
  return ["auto", "lookup"].includes(method) && draftTokens !== 0;
}

function drafts(settings) {
  const fields = {};
  if (settings.method !== "off" && settings.draftTokens >= 0) fields.speculative_tokens = settings.draftTokens;
  if (settings.history && takesHistory(settings)) fields.speculative_history = settings.history === "on";
  return fields;
}

// What differs from neutral values. Conversations of earlier versions of the page lack some settings.
function sampling({ temperature, topP, topK, minP, typicalP, repetition, frequency, presence }) {
  const fields = {};
  if (temperature > 0) {
    if (topP < 1) fields.top_p = topP;
    if (topK > 0) fields.top_k = topK;
    if (minP > 0) fields.min_p = minP;
    if (typicalP < 1) fields.typical_p = typicalP;
  }
  if (repetition !== 1) fields.repetition_penalty = repetition;
  if (frequency) fields.frequency_penalty = frequency;
  if (presence) fields.presence_penalty = presence;
  return fields;
}

function format(settings) {
  if (settings.format === "json") return { response_format: { type: "json_object", schema: JSON.parse(settings.grammar) } };
  if (settings.format === "regex") return { guided_regex: settings.grammar };
  if (settings.format === "choice") return { guided_choice: settings.grammar.split("\n").filter(Boolean) };
  if (settings.format === "grammar") return { guided_grammar: settings.grammar };
  return {};
}

// Sends the request that `request` makes; `changed` is called after every change of `answer`.
export async function run(answer, request, changed) {
  try {
    const { path, body } = request();
    await follow(answer, changed, () => send(path, {
      method: "POST", body, headers: { "x-lorikeet-resumable": TTL, "x-request-id": answer.id },
    }));
  } catch (error) {
    fail(answer, error, changed);
  }
}

// Goes on with an answer that was running when the page was left: from its beginning, so that nothing can be missing.
// What was kept of it is shown until then.
export async function resume(answer, changed) {
  try {
    await follow(answer, changed, () => readOn(answer, 0), true);
  } catch (error) {
    fail(answer, error, changed);
  }
}

export async function stop(answer, changed) {
  if (answer.state !== "running") return;
  end(answer, "stopped", changed);
  await send(`v1/streams/${answer.id}`, { method: "DELETE" }).catch(() => {});
}

class Gone extends ApiError {}

async function readOn(answer, from) {
  try {
    return await send(`v1/streams/${answer.id}?from=${from}`);
  } catch (error) {
    throw error.status === 404 ? new Gone(404, error.message) : error;
  }
}

// Reads the stream, and reads on where the connection broke. `isKept`: the first event replaces what is there.
async function follow(answer, changed, open, isKept = false) {
  let failures = 0;
  for (let next = open; answer.state === "running"; ) {
    try {
      const response = await next();
      for await (const event of events(response)) {
        if (answer.state !== "running") return;
        failures = 0;
        if (isKept) Object.assign(answer, structuredClone(NOTHING));
        isKept = false;
        answer.note = "";
        take(answer, event);
        changed();
      }
      if (answer.state === "running") throw new TypeError("the connection ended early");
    } catch (error) {
      if (error instanceof ApiError || answer.state !== "running" || failures >= RETRY_MS.length) throw error;
      answer.note = `${answer.numEvents || isKept ? "The connection was lost: reading further" : "The server does not answer yet: trying again"}… (${failures + 1} of ${RETRY_MS.length})`;
      changed();
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[failures++]));
      next = () => readOn(answer, isKept ? 0 : answer.numEvents);
    }
  }
}

function take(answer, data) {
  answer.numEvents += 1;
  const event = data === "[DONE]" ? { isLast: true } : JSON.parse(data);
  if (event.error) throw new ApiError(0, event.error.message || event.error);
  if (event.token) takeToken(answer, event.token);
  for (const choice of event.choices || []) takeChoice(answer, choice);
  if (event.generated_text !== null && event.generated_text !== undefined) {
    answer.text = event.generated_text;
    answer.finish = event.details?.finish_reason || "";
    event.isLast = true;
  }
  if (event.isLast) Object.assign(answer, { state: "done", endedAt: Date.now() });
}

// Of a chat: text, reasoning, or a part of a call.
function takeChoice(answer, { delta, tokens, finish_reason: finish, stop_reason: stop }) {
  tokens?.forEach((token) => takeToken(answer, token, false));
  answer.text += delta.content || "";
  answer.reasoning += delta.reasoning_content || "";
  for (const { index, id, function: { name, arguments: more } } of delta.tool_calls || []) {
    answer.calls[index] ||= { id, name, arguments: "" };
    answer.calls[index].arguments += more;
  }
  if (finish) answer.finish = finish === "stop" && typeof stop === "string" ? "stop_sequence" : finish;
}

function takeToken(answer, token, isText = true) {
  answer.firstAt ||= Date.now();
  const { id, text, logprob, special, skipped, source, alternative_tokens: others } = token;
  answer.tokens.push({
    id, text, logprob, source, skipped, special: special || undefined,
    others: others?.map((other) => [other.text, other.logprob]),
  });
  if (isText && !special) answer.text += text;
}

function end(answer, state, changed) {
  answer.state = state;
  answer.endedAt = Date.now();
  changed();
}

function fail(answer, error, changed) {
  if (answer.state !== "running") return;
  const kept = answer.tokens.length ? "The server does not keep the rest of this answer: this is its beginning." : "The server does not keep this answer.";
  answer.error = error instanceof Gone ? `${kept} With the same seed, Regenerate gives the same text.` : error.message;
  const hasAnswer = error instanceof ApiError;
  const status = hasAnswer ? error.status : error instanceof TypeError ? null : 0;
  answer.problem = { status: error instanceof Gone ? 0 : status, message: answer.error, retryAfter: hasAnswer ? error.retryAfter : 0 };
  answer.note = "";
  end(answer, "failed", changed);
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

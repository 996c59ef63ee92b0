// Errors in words that say what to do.

const PREFIX = /^(Request failed during generation: Server error: |Input validation error: )/;
const KINDS = { 401: "key", 403: "key", 404: "adapter", 429: "full", 503: "wait", 0: "failed" };

// What goes with an answer that failed: [sentence, what the button below it does, or ""].
// `problem` is {status, message, retryAfter}; a status of null is a server that does not answer.
export function explain({ status, message, retryAfter }, adapter) {
  const text = message.replace(PREFIX, "");
  if (status === null) return ["The server does not answer. Your message is kept here: try again when the server runs.", "again"];
  if (KINDS[status] === "key" && !adapter) return ["The server does not accept this key. Enter the key that its operator gave you.", "key"];
  if (KINDS[status] === "adapter" && adapter) return [`The server has no adapter “${adapter}”. ${nearest(text)}Check the spelling, or choose one from the list.`, "adapter"];
  if (KINDS[status] === "full") return [`The queue is full: more people ask than the server takes at once. Try again ${when(retryAfter)}.`, "again"];
  if (KINDS[status] === "wait" && /no shard|loading/i.test(text)) return [`The model is not ready yet. Try again ${when(retryAfter)}.`, "again"];
  return [`${text.charAt(0).toUpperCase()}${text.slice(1)}`, "again"];
}

const when = (seconds) => (seconds > 1.5 ? `in ${Math.ceil(seconds)} seconds` : "in a moment");

// The server's proposal of names that are spelled alike, if its message has one.
function nearest(text) {
  const sentence = /(did you mean|the nearest|the hub's own)[^?.]*[?.]?/i.exec(text)?.[0];
  return sentence ? `${sentence.charAt(0).toUpperCase()}${sentence.slice(1)} ` : "";
}

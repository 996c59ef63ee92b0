// Requests to the server that this page came from. All paths are relative to the page.

export const ROOT = new URL("./", document.baseURI);
const KEY = "lorikeet-key";

// An answer with an error. `status` is 0 for an error within a stream; `retryAfter` is in seconds.
export class ApiError extends Error {
  constructor(status, message, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// The key lives as long as the browser's tab.
export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// 32 hexadecimal digits. `crypto.randomUUID` exists only in secure contexts: not over plain http from another host.
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function url(path) {
  return new URL(path, ROOT);
}

// `body` is sent as JSON, `content` as it is.
export async function send(path, { method = "GET", body, content, headers = {}, signal, keepalive } = {}) {
  const sent = { accept: "application/json, text/event-stream", ...headers };
  if (key.get()) sent.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  const response = await fetch(url(path), {
    method, signal, headers: sent, keepalive, cache: "no-store", credentials: "same-origin",
    body: body === undefined ? content : JSON.stringify(body),
  });
  if (!response.ok) throw new ApiError(response.status, await reason(response), Number(response.headers.get("retry-after")) || 0);
  return response;
}

export async function json(path, options) {
  return (await send(path, options)).json();
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.message || error;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

// The data of each server-sent event. Throws where the connection breaks.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const event = text.slice(0, end);
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

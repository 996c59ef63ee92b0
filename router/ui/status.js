// Whether the server takes requests: asked every second until it does, and every ten seconds after that.

import { ApiError, json } from "./api.js";
import { button, el } from "./dom.js";

const RETRY_MS = 1000;
const POLL_MS = 10000;
const TIMEOUT_MS = 5000; // a server that is shutting down may accept a connection and never answer

// 72 s is "1 min 12 s".
export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export class ServerStatus {
  // `capabilities` are the last ones; `onChange` is called when the state changes.
  constructor(capabilities, onChange) {
    this.capabilities = capabilities;
    this.onChange = onChange;
    this.since = performance.now() - 1000 * (capabilities.version ? 0 : capabilities.uptime_s);
    this.text = el("span", { role: "status" });
    this.element = el("div", { class: "server-state", hidden: true }, el("span", { class: "spinner", "aria-hidden": "true" }), this.text,
      button("Try now", { class: "small", onclick: () => this.check() }));
    this.#take(stateOf(capabilities));
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    this.#plan();
    setInterval(() => this.#write(), 1000);
  }

  get isReady() {
    return this.state === "ready";
  }

  // Asks at once: after a request got no answer, too.
  async check() {
    clearTimeout(this.timer);
    try {
      this.capabilities = await json("v1/capabilities", { signal: AbortSignal.timeout(TIMEOUT_MS) });
      this.#take(stateOf(this.capabilities));
    } catch (error) {
      this.#take(error instanceof ApiError && error.status === 401 ? "key" : error instanceof ApiError ? "ready" : "gone");
    }
    this.#plan();
  }

  #plan() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => (document.hidden ? this.#plan() : this.check()), this.isReady ? POLL_MS : RETRY_MS);
  }

  #take(state) {
    if (state === this.state) return;
    if (this.state) this.since = performance.now();
    this.state = state;
    this.#write();
    this.onChange(state);
  }

  #write() {
    this.element.hidden = this.isReady;
    this.element.dataset.state = this.state;
    const seconds = span((performance.now() - this.since) / 1000);
    const text = {
      ready: "",
      loading: `The model is loading: ${seconds} so far. You can write your message already.`,
      draining: "The server is shutting down. It finishes running answers and takes no new ones.",
      gone: `The server has not answered for ${seconds}. Check that it runs; this page connects again by itself.`,
      key: "The server needs another API key than the one you gave.",
    }[this.state];
    if (this.text.textContent !== text) this.text.textContent = text;
  }
}

function stateOf({ ready, draining }) {
  return ready ? "ready" : draining ? "draining" : "loading";
}

// What the server does now: one event stream of snapshots, drawn as numbers, lines and bars.

import { ApiError, events, send } from "./api.js";
import { Line, parts } from "./charts.js";
import { el, number } from "./dom.js";
import { SOURCES } from "./tokens.js";

const RETRY_MS = 2000;
const MAX_ROWS = 24;

export class LiveView {
  constructor(element, capabilities) {
    this.root = element;
    this.isOpen = false;
    this.last = null;
    this.state = el("p", { class: "live-state dim", role: "status" });
    this.body = el("div", { class: "live-grid" });
    element.append(el("div", { class: "live-head" }, el("h2", {}, "Live view"), this.state), this.body);
    if (capabilities.may_watch) this.#build();
    else this.state.textContent = "The live view shows requests of all callers, so it needs the admin key. Enter it above as API key.";
    this.mayWatch = capabilities.may_watch;
  }

  #build() {
    this.rate = new Line("Output tokens per second");
    this.rateNow = el("strong", { class: "big" }, "–");
    this.promptNow = el("strong", { class: "big" }, "–");
    this.counts = Object.fromEntries(["running", "waiting", "preempted"].map((kind) => [kind, el("strong", { class: "big" }, "0")]));
    this.steps = el("div", { class: "steps" });
    this.memory = el("div");
    this.tiers = el("dl", { class: "facts" });
    this.drafts = el("div");
    this.adapters = el("div");
    this.shards = el("div");
    this.failures = el("div");
    const card = (title, className, ...children) => el("section", { class: `card panel ${className}`, "aria-label": title }, el("h3", {}, title), children);
    const keys = [["prefill", "prompt tokens"], ["decode", "next token"], ["drafts", "draft tokens"]];
    this.body.append(
      card("Output", "wide", el("p", { class: "figure" }, this.rateNow, " tokens/s"), this.rate.element),
      card("Requests", "", el("div", { class: "figures" }, Object.entries(this.counts).map(([kind, value]) => el("p", { class: "figure" }, value, ` ${kind}`))),
        el("p", { class: "figure" }, this.promptNow, " prompt tokens/s")),
      card("Current step", "wide", el("p", { class: "legend" }, keys.map(([kind, name]) => el("span", { class: "legend-item" }, el("span", { class: `swatch ${kind}` }), ` ${name}`))), this.steps),
      card("KV pages", "", this.memory),
      card("Adapters", "wide", this.adapters), card("Where adapters are", "", this.tiers),
      card("Replicas", "wide", this.shards), card("Draft tokens accepted", "", this.drafts), card("Failures since the start", "wide", this.failures));
  }

  start() {
    if (this.isOpen || !this.mayWatch) return;
    this.isOpen = true;
    this.#follow();
  }

  stop() {
    this.isOpen = false;
    this.abort?.abort();
  }

  async #follow() {
    while (this.isOpen) {
      this.abort = new AbortController();
      try {
        const response = await send("v1/live", { signal: this.abort.signal });
        for await (const event of events(response)) {
          if (!this.isOpen) return;
          this.#draw(JSON.parse(event));
        }
      } catch (error) {
        if (!this.isOpen) return;
        this.last = null;
        this.state.textContent = error instanceof ApiError ? error.message : "Connection lost, connecting again…";
        if (error instanceof ApiError && error.status === 403) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #draw(now) {
    const before = this.last;
    const seconds = before ? Math.max(0.05, now.time - before.time) : 0;
    const rate = (name) => (before && now[name] >= before[name] ? (now[name] - before[name]) / seconds : 0);
    this.rate.add(rate("generated_tokens"));
    this.rateNow.textContent = number(rate("generated_tokens"));
    this.promptNow.textContent = number(rate("prompt_tokens"));
    for (const [kind, value] of Object.entries(this.counts)) value.textContent = number(now.requests[kind]);
    this.state.textContent = now.draining ? "The server is shutting down: it finishes running requests." : "Updated twice a second.";
    this.#drawSteps(now.shards);
    this.#drawMemory(now.shards);
    this.#drawTiers(now.tiers);
    this.#drawDrafts(now.drafts);
    this.#drawAdapters(now.adapters);
    this.#drawShards(now.shards);
    this.#drawFailures(now.failures);
    this.last = now;
  }

  #drawSteps(shards) {
    const pictures = shards.filter((shard) => shard.step?.length).map((shard) => {
      const most = Math.max(...shard.step.map((part) => part.tokens + part.drafts), 8);
      const rows = shard.step.slice(0, MAX_ROWS).map((part) => el("div", { class: "step-row" },
        el("span", { class: "step-name", title: part.adapter || "base model" }, `#${part.request} ${part.adapter || "base model"}`),
        parts([[part.prefill ? "prefill" : "decode", part.tokens, part.prefill ? "prompt" : "next"], ["drafts", part.drafts, "drafts"]], most, `Request ${part.request}`),
        el("span", { class: "dim step-count" }, part.drafts ? `${part.tokens}+${part.drafts}` : String(part.tokens))));
      const rest = shard.step.length - MAX_ROWS;
      return el("div", {}, shards.length > 1 ? el("p", { class: "dim" }, `Replica ${shard.index}`) : null, rows, rest > 0 ? el("p", { class: "dim" }, `and ${rest} more`) : null);
    });
    this.steps.replaceChildren(...(pictures.length ? pictures : [el("p", { class: "dim" }, "No request runs.")]));
  }

  #drawMemory(shards) {
    this.memory.replaceChildren(...shards.filter((shard) => shard.pages).map((shard) => {
      const free = Math.max(0, shard.pages - shard.used_pages - shard.cached_pages);
      return el("div", { class: "memory" }, parts([["used", shard.used_pages, "used"], ["cached", shard.cached_pages, "cached prefixes"], ["free", free, "free"]], shard.pages, "KV pages"),
        el("p", { class: "dim" }, `${number(shard.used_pages)} used, ${number(shard.cached_pages)} cached, ${number(free)} free of ${number(shard.pages)}`));
    }));
  }

  #drawTiers(tiers) {
    const facts = [["on the device", tiers.device], ["in host memory", tiers.host], ["on disk", tiers.disk], ["moving to the device", tiers.into_slot]];
    const names = tiers.from_source.length ? [el("div", {}, el("dt", {}, "being loaded"), el("dd", {}, tiers.from_source.join(", ")))] : [];
    this.tiers.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, number(value)))), ...names);
  }

  #drawDrafts(drafts) {
    const rows = Object.entries(drafts).map(([source, { drafted, accepted }]) => el("div", { class: "draft-row" },
      el("span", {}, (SOURCES[source] || [source])[0]), parts([[source, accepted, "accepted"]], drafted, source),
      el("span", { class: "dim" }, `${number((100 * accepted) / Math.max(1, drafted))} % of ${number(drafted)}`)));
    this.drafts.replaceChildren(...(rows.length ? rows : [el("p", { class: "dim" }, "No draft token was verified yet.")]));
  }

  #drawAdapters(adapters) {
    const rows = adapters.map((each) => [each.num_others ? `${each.num_others} others` : each.name || "base model", each.running, each.waiting, each.preempted]);
    this.adapters.replaceChildren(table(["Adapter", "Running", "Waiting", "Preempted"], rows, "No request is in the server."));
  }

  #drawShards(shards) {
    const rows = shards.map((shard) => [
      `${shard.index}${shard.device ? ` (${shard.device})` : ""}`, shard.ready ? "ready" : shard.connected ? "connected" : "not connected",
      shard.running, shard.waiting ?? "–", shard.step_ms === undefined ? "–" : `${shard.step_ms} ms`, shard.step_tokens ?? "–", shard.resident_adapters,
    ]);
    this.shards.replaceChildren(table(["Replica", "State", "Running", "Waiting", "Step", "Tokens", "Adapters"], rows, "There is no replica."));
  }

  #drawFailures(failures) {
    const rows = failures.slice(0, 8).map((each) => [each.kind, each.status, each.count, new Date(1000 * each.last_at).toLocaleTimeString()]);
    this.failures.replaceChildren(table(["Kind", "Status", "Number", "Last"], rows, "None."));
  }
}

function table(head, rows, empty) {
  if (!rows.length) return el("p", { class: "dim" }, empty);
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": head[0] }, el("table", {}, el("thead", {}, el("tr", {}, head.map((each) => el("th", { scope: "col" }, each)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((each, index) => (index ? el("td", {}, String(each)) : el("th", { scope: "row" }, String(each)))))))));
}

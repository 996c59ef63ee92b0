// What the server does now: one event stream of snapshots, drawn as numbers, lines and bars.

import { ApiError, events, send } from "../api.js";
import { Line, parts } from "./charts.js";
import { el, number } from "../dom.js";
import { SOURCES } from "../sources.js";

const RETRY_MS = 2000;
const MAX_ROWS = 24;
const WINDOW_S = 60;
const RATE_S = 2; // rates are those of the last two seconds: steps come in bursts

export class LiveView {
  constructor(element, capabilities) {
    this.root = element;
    this.isOpen = false;
    this.recent = []; // snapshots
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
    this.draftsNote = el("p", { class: "dim note" });
    this.totals = []; // [time, draft tokens by source] of the last minute
    this.adapters = new Table(["Adapter", "Running", "Waiting", "Preempted"], "No request is in the server.");
    this.shards = new Table(["Replica", "State", "Running", "Waiting", "Step", "Tokens", "Adapters"], "There is no replica.");
    this.failures = new Table(["Kind", "Status", "Last minute", "Ten minutes", "Last at"], "None.");
    const card = (title, ...children) => el("section", { class: "card panel", "aria-label": title }, el("h3", {}, title), children);
    const keys = [["prefill", "prompt tokens"], ["decode", "next token"], ["drafts", "draft tokens"]];
    this.body.append(el("div", { class: "live-column" },
      card("Output", el("p", { class: "figure" }, this.rateNow, " tokens/s"), this.rate.element),
      card("Current step", el("p", { class: "legend" }, keys.map(([kind, name]) => el("span", { class: "legend-item" }, el("span", { class: `swatch ${kind}` }), ` ${name}`))), this.steps),
      card("Adapters", this.adapters.element), card("Replicas", this.shards.element), card("Failures of the last ten minutes", this.failures.element)),
    el("div", { class: "live-column" },
      card("Requests", el("div", { class: "figures" }, Object.entries(this.counts).map(([kind, value]) => el("p", { class: "figure" }, value, ` ${kind}`))),
        el("p", { class: "figure" }, this.promptNow, " prompt tokens/s")),
      card("KV pages", this.memory), card("Where adapters are", this.tiers), card("Draft tokens accepted", this.draftsNote, this.drafts)));
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
          this.draw(JSON.parse(event));
        }
      } catch (error) {
        if (!this.isOpen) return;
        this.recent = [];
        this.state.textContent = error instanceof ApiError ? error.message : "Connection lost, connecting again…";
        if (error instanceof ApiError && error.status === 403) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  draw(now) {
    this.recent.push(now);
    while (now.time - this.recent[0].time > RATE_S) this.recent.shift();
    const [before] = this.recent;
    const seconds = Math.max(0.05, now.time - before.time);
    const rate = (name) => Math.max(0, now[name] - before[name]) / seconds;
    this.rate.add(rate("generated_tokens"));
    this.rateNow.textContent = number(rate("generated_tokens"));
    this.promptNow.textContent = number(rate("prompt_tokens"));
    for (const [kind, value] of Object.entries(this.counts)) value.textContent = number(now.requests[kind]);
    this.state.textContent = now.draining ? "The server is shutting down: it finishes running requests." : "Updated twice a second.";
    this.#drawSteps(now.shards);
    this.#drawMemory(now.shards);
    this.#drawTiers(now.tiers);
    this.#drawDrafts(now);
    this.#drawAdapters(now.adapters);
    this.#drawShards(now.shards);
    this.#drawFailures(now.failures);
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

  // Counts of the last minute: a total since the start would no longer move after a day.
  #drawDrafts({ time, drafts }) {
    const { totals } = this;
    const last = totals.at(-1);
    const isRestarted = last && Object.entries(last[1]).some(([source, { drafted }]) => !(drafts[source]?.drafted >= drafted));
    if (isRestarted) totals.length = 0;
    totals.push([time, drafts]);
    while (time - totals[0][0] > WINDOW_S) totals.shift();
    const [since, before] = totals[0];
    const rows = Object.entries(drafts).flatMap(([source, { drafted, accepted }]) => {
      const numDrafted = drafted - (before[source]?.drafted || 0);
      const numAccepted = accepted - (before[source]?.accepted || 0);
      return numDrafted <= 0 ? [] : [el("div", { class: "draft-row" },
        el("span", {}, (SOURCES[source] || [source])[0]), parts([[source, numAccepted, "accepted"]], numDrafted, source),
        el("span", { class: "dim" }, `${number((100 * numAccepted) / numDrafted)} % of ${number(numDrafted)}`))];
    });
    const seconds = Math.round(time - since);
    this.draftsNote.textContent = seconds >= WINDOW_S - 1 ? "In the last minute" : `Since this view was opened, ${seconds} s ago`;
    this.drafts.replaceChildren(...(rows.length ? rows : [el("p", { class: "dim" }, "No draft token was verified.")]));
  }

  #drawAdapters(adapters) {
    const rows = adapters.map((each) => [each.num_others ? `${each.num_others} others` : each.name || "base model", each.running, each.waiting, each.preempted]);
    this.adapters.update(rows);
  }

  #drawShards(shards) {
    const rows = shards.map((shard) => [
      `${shard.index}${shard.device ? ` (${shard.device})` : ""}`, shard.ready ? "ready" : shard.connected ? "connected" : "not connected",
      shard.running, shard.waiting ?? "–", shard.step_ms === undefined ? "–" : `${shard.step_ms} ms`, shard.step_tokens ?? "–",
      shard.adapter_slots ? `${shard.resident_adapters} of ${shard.adapter_slots}` : shard.resident_adapters,
    ]);
    this.shards.update(rows);
  }

  #drawFailures(failures) {
    const rows = failures.slice(0, 8).map((each) => [each.kind, each.status, each.last_minute, each.count, new Date(1000 * each.last_at).toLocaleTimeString()]);
    this.failures.update(rows);
  }
}

// A table that keeps its element, so that the focus and the place that it was scrolled to stay.
class Table {
  constructor(head, empty) {
    this.rows = el("tbody", {});
    this.scroll = el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": head[0] },
      el("table", {}, el("thead", {}, el("tr", {}, head.map((each) => el("th", { scope: "col" }, each)))), this.rows));
    this.empty = el("p", { class: "dim" }, empty);
    this.element = el("div", {}, this.scroll, this.empty);
    this.update([]);
  }

  update(rows) {
    this.scroll.hidden = !rows.length;
    this.empty.hidden = Boolean(rows.length);
    this.rows.replaceChildren(...rows.map((row) => el("tr", {}, row.map((each, index) => (index ? el("td", {}, String(each)) : el("th", { scope: "row" }, String(each)))))));
  }
}

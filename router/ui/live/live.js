// What the server does now: one event stream of snapshots, drawn as numbers, lines and bars.

import { ApiError, events, send } from "../api.js";
import { LineChart, parts } from "./charts.js";
import { button, duration, el, number } from "../dom.js";
import { SOURCES } from "../sources.js";

const RETRY_MS = 2000;
const MAX_ROWS = 24;
const WINDOW_S = 60;
const RATE_S = 2; // rates are those of the last two seconds: steps come in bursts
const LATENCY_S = 10;

export class LiveView {
  // `menu` is the button of the sidebar.
  constructor(element, capabilities, { menu = "", askKey = null } = {}) {
    this.root = element;
    this.isOpen = false;
    this.recent = []; // snapshots of the last LATENCY_S
    this.state = el("p", { class: "live-state dim", role: "status" });
    this.body = el("div", { class: "live-grid" });
    element.append(el("link", { rel: "stylesheet", href: new URL("./live.css", import.meta.url).href }),
      el("header", { class: "bar" }, menu, el("h2", {}, "Live"), this.state), el("div", { class: "live-scroll" }, this.body));
    if (capabilities.may_watch) this.#build();
    else {
      const isWrong = capabilities.key;
      this.state.textContent = "";
      this.body.replaceWith(el("div", { class: "live-login" }, el("h2", {}, "The live view needs the admin key"),
        el("p", { class: "dim" }, "It shows requests of all callers. ", isWrong ? `The key “${capabilities.key}” is not an admin key. ` : "", "Whoever runs the server has the admin key."),
        button("Enter the key", { class: "primary", onclick: () => askKey() }, "key")));
    }
    this.mayWatch = capabilities.may_watch;
  }

  #build() {
    const figure = (name) => {
      const value = el("strong", { class: "big" }, "–");
      return [value, el("div", { class: "tile panel" }, el("span", { class: "dim" }, name), value)];
    };
    const tiles = [["rate", "Output tokens/s"], ["prompts", "Prompt tokens/s"], ["first", "Time to first token"], ["between", "Between tokens"],
      ["running", "Running"], ["waiting", "Waiting"]].map(([name, title]) => {
      const [value, tile] = figure(title);
      this.tiles_ = { ...this.tiles_, [name]: value };
      return tile;
    });
    this.rate = new LineChart("Output tokens per second", [["one", "tokens/s"]], (value) => `${number(value, value < 10 && value % 1 ? 1 : 0)}/s`, 10);
    const latencyLines = [["one", "median"], ["two", "95 % are faster"]];
    this.first = new LineChart("Time to first token", latencyLines, duration, 10);
    this.between = new LineChart("Time between tokens", latencyLines, duration, 1);
    this.steps = el("div", { class: "steps" });
    this.memory = el("div");
    this.tiers = el("dl", { class: "facts" });
    this.drafts = el("div");
    this.draftsNote = el("p", { class: "dim note" });
    this.totals = []; // [time, draft tokens by source] of the last minute
    this.adapters = new Table(["Adapter", "Running", "Waiting", "Preempted"], "No request is in the server.");
    this.shards = new Table(["Replica", "State", "Running", "Waiting", "Step", "Tokens", "Adapters"], "There is no replica.");
    this.failures = new Table(["Kind", "Status", "Last minute", "Ten minutes", "Last at"], "None.");
    const card = (title, size, ...children) => el("section", { class: `card panel ${size}`, "aria-label": title }, el("h3", {}, title), children);
    const keys = [["prefill", "prompt tokens"], ["decode", "next token"], ["drafts", "draft tokens"]];
    this.body.append(el("div", { class: "tiles", role: "group", "aria-label": "Now" }, tiles),
      card("Output", "", this.rate.element), card("Time to first token", "", this.first.element), card("Time between tokens", "", this.between.element),
      card("Current step", "", el("p", { class: "legend" }, keys.map(([kind, name]) => el("span", { class: "legend-item" }, el("span", { class: `swatch ${kind}` }), ` ${name}`))), this.steps),
      el("div", { class: "live-column" }, card("Adapters", "grows", this.adapters.element), card("Where adapters are", "", this.tiers)),
      el("div", { class: "live-column" }, card("KV pages", "", this.memory), card("Draft tokens accepted", "grows", this.draftsNote, this.drafts)),
      card("Replicas", "double", this.shards.element), card("Failures of the last ten minutes", "", this.failures.element));
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
        this.state.textContent = error instanceof ApiError ? error.message : "The server does not answer. This view connects again by itself.";
        if (error instanceof ApiError && error.status === 403) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  draw(now) {
    this.recent.push(now);
    while (now.time - this.recent[0].time > LATENCY_S) this.recent.shift();
    const before = this.recent.find(({ time }) => now.time - time <= RATE_S);
    const seconds = Math.max(0.05, now.time - before.time);
    const rate = (name) => Math.max(0, now[name] - before[name]) / seconds;
    const { tiles_: tiles } = this;
    this.rate.add(now.time, rate("generated_tokens"));
    tiles.rate.textContent = number(rate("generated_tokens"));
    tiles.prompts.textContent = number(rate("prompt_tokens"));
    const { running, waiting, preempted } = now.requests;
    tiles.running.textContent = number(running);
    tiles.waiting.textContent = preempted ? `${number(waiting)} + ${number(preempted)} preempted` : number(waiting);
    for (const [kind, name] of [["first", "first_token"], ["between", "between_tokens"]]) {
      const [half, most] = [0.5, 0.95].map((part) => quantile(now.latency?.[name], this.recent[0].latency?.[name], part));
      this[kind].add(now.time, half, most);
      tiles[kind].textContent = half === null ? "–" : duration(half);
      tiles[kind].title = half === null ? "" : `Median of the last ${LATENCY_S} seconds. 95 % took at most ${duration(most)}`;
    }
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

// The time in ms that `part` of the observations between two snapshots took at most, null without any. Both are
// [bound in seconds, number at most so long] of each bucket; within a bucket, observations are taken as evenly spread.
export function quantile(now, before, part) {
  if (!now?.length || !before?.length) return null;
  const counts = now.map(([bound, count], index) => [bound, count - before[index][1]]);
  const total = counts.at(-1)[1];
  if (total <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= part * total) return 1000 * (low + (bound - low) * ((part * total - below) / (count - below || 1)));
    [low, below] = [bound, count];
  }
  return 1000 * low;
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

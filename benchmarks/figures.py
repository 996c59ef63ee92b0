"""All suites of figures that are published, with their targets."""

from functools import partial

from benchmarks.adapters import activated, cost, fairness, goodput, loading, tiers
from benchmarks.evidence.figure import Figure, Over, Suite, raw_value
from benchmarks.load.peers import VLLM_VERSION
from benchmarks.load.rounds import OURS, VLLM, first_token, speedup
from benchmarks.serving import closed_loop, pauses, start
from benchmarks.speculation import counts, heads, history, lookup, speed
from tests.endurance import faults

at_most = partial(Figure, at_least=False)
embedded = partial(Suite, model="embedded model", dtype="float32")
embedded_bf16 = partial(embedded, dtype="bfloat16")
large = partial(Suite, model="random Llama, 200 M", dtype="bfloat16")
VLLM_ON_CPU = f"vLLM {VLLM_VERSION} (CPU)"

TARGET_SHARE = {1: 0.72, 8: 0.80, 32: 0.80}
OVER_VLLM = {1: 1.4, 8: 1.3, 32: 1.25}
FIRST_TOKEN_OVER_VLLM = {32: 1.0}
"""Targets by clients."""
HISTORY = {history.ALL: 2.0, history.HALF: 1.5, history.NONE: 1.0}
"""Targets by the part of requests that repeat an earlier prompt."""


def _clients(count: int) -> str:
    return f"{count} client" if count == 1 else f"{count} clients"


def _closed(clients: int) -> Suite:
    figures = (
        Figure(f"share of the machine's limit, {_clients(clients)}", closed_loop.share_of_limit, TARGET_SHARE[clients]),
        Figure(f"throughput over vLLM, {_clients(clients)}", partial(speedup, OURS, VLLM), OVER_VLLM[clients],
               unit="×"),
        at_most(f"time to first token over vLLM's, {_clients(clients)}", partial(first_token, OURS, VLLM),
                FIRST_TOKEN_OVER_VLLM.get(clients)),
    )  # fmt: skip
    return large(
        f"closed-{clients}", partial(closed_loop.measure, clients), closed_loop.ROUNDS, figures, void=closed_loop.void,
        peer=VLLM_ON_CPU,
    )  # fmt: skip


SERVING = (
    *map(_closed, TARGET_SHARE),
    embedded_bf16("start", start.measure, start.ROUNDS,
                  (at_most("second start of the embedded model", partial(raw_value, "ready_s"), 10.0, unit="s"),
                   at_most("second start over its imports", partial(raw_value, "ready_over_imports"), 1.2, unit="×"),
                   at_most("memory of all processes, no adapter", partial(raw_value, "pss_mib"), 650, unit="MiB"),
                   at_most("answer after the shard was killed", partial(raw_value, "recovery_s"), 2.0, unit="s"))),
)  # fmt: skip
"""Whole servers."""

ADAPTERS = (
    large("adapters-cost", cost.measure, cost.ROUNDS,
          (Figure("8 adapters on q, k, v, o over the base", partial(speedup, "attention", "base"), 0.88),
           Figure("8 adapters on all linears over the base", partial(speedup, "all", "base"), 0.90),
           Figure("256 adapters over 16 slots, of 8 resident", partial(speedup, "rotation", "attention"), 0.80))),
    large("adapters-ranks", cost.mixed_ranks, cost.ROUNDS,
          (at_most("time per token of a LoRA of rank 8 next to others of rank 64, over next to others of rank 8",
                   cost.small_over_alone, 1.05),)),
    large("alora-first-token", activated.measure, activated.ROUNDS,
          (at_most("time to first token of an activated LoRA over the base model, after 2048 tokens",
                   partial(activated.ratio, activated.ACTIVATED, activated.BASE), 1.15),
           Figure("time to first token of the same weights as LoRA over activated LoRA, after 2048 tokens",
                  partial(activated.ratio, activated.PLAIN, activated.ACTIVATED), 20.0, unit="×"))),
    large("alora-mixed", activated.mixed, activated.MIXED_ROUNDS,
          (Figure("throughput of base, LoRA and activated LoRA in one batch over LoRA alone",
                  partial(speedup, activated.MIXED, activated.LORA), 1.0),)),
    large("adapters-idle", cost.without, cost.IDLE_ROUNDS,
          (Figure("requests without an adapter, over a server without adapters", cost.idle_share, 0.99),)),
    large("adapters-peer", cost.against_vllm, cost.ROUNDS,
          (Figure("throughput over vLLM, 8 adapters", partial(speedup, OURS, VLLM), 6.0, unit="×"),),
          peer=VLLM_ON_CPU),
    large("adapters-loading", loading.measure, loading.ROUNDS,
          (at_most("p99 time between tokens while 64 adapters load, over without", loading.active, 1.1),
           at_most("p99 time between tokens while 64 adapters are requested at once, over without",
                   loading.active_at_once),
           at_most("loading 64 adapters on an idle shard, over reading and checking them", loading.over_plain, 2.0),
           at_most("longest wait for an adapter while both cores are busy", loading.longest_wait, 5.0, unit="s",
                   over=Over.WORST))),
    large("adapters-tiers", tiers.measure, tiers.ROUNDS,
          (at_most("time to first token, adapter in host memory over resident", partial(tiers.over_resident, "host"),
                   1.3),
           at_most("time to first token, adapter on disk over resident", partial(tiers.over_resident, "disk"), 3.0),
           at_most("time to first token, adapter on disk over host memory", tiers.disk_over_host, 1.3))),
    large("adapters-flood", fairness.flood, fairness.FLOOD_ROUNDS,
          (at_most("p99 time to first token of other adapters during a flood, over without", fairness.others_wait, 1.5,
                   over=Over.POOLED),)),
    large("adapters-weights", fairness.weights, fairness.ROUNDS,
          (at_most("distance of the token ratio from weights 3 and 1", fairness.off_weight, 0.3),)),
    *(
        large(f"adapters-goodput-{count}", partial(goodput.measure, count), 1,
              (Figure(f"highest request rate with {count} adapters, a fifth of them in memory, over all in memory",
                      goodput.share_of_resident, 0.92, over=Over.WORST),),
              void=goodput.void, options={"count": count})
        for count in (1000, 2000)
    ),
)  # fmt: skip


def _schedule(load: int) -> tuple[Suite, Suite]:
    """Under one load: schedule auto against the best fixed width, and the cost of drafts that are never accepted."""
    ratio = partial(partial, speedup)
    return (
        large(f"speculation-schedule-{load}", partial(speed.schedules, load), speed.SCHEDULE_ROUNDS,
              (Figure(f"schedule auto over the best fixed draft length, {load} at once",
                      ratio(speed.AUTO, speed.FIXED), 0.98),)),
        large(f"speculation-rejected-{load}", partial(speed.rejected, load), speed.ROUNDS,
              (Figure(f"schedule auto over off, nothing accepted, {load} at once", ratio(speed.REJECTED, speed.OFF),
                      0.97),
               Figure(f"one request above the batch limit of speculation, over off, {load} at once",
                      ratio(speed.LIMITED, speed.OFF), 0.97))),
    )  # fmt: skip


def _history(workload: str) -> Suite:
    name = f"tokens per step of history drafts over prompt lookup, {workload} of the prompts repeated"
    return embedded(f"speculation-history-{workload}", partial(history.measure, workload), len(history.TEMPERATURES),
                    (Figure(name, history.gain, HISTORY[workload], over=Over.WORST),))  # fmt: skip


SPECULATION = (
    embedded("speculation-copied", counts.copied, len(counts.LOOKUP_WIDTHS),
             (Figure("tokens per step of prompt lookup over LoRAX's rule, copied texts", counts.over_lorax, 1.08,
                     over=Over.WORST),
              at_most("rows drafted by prompt lookup over LoRAX's rule, copied texts", counts.rows_over_lorax, 0.9,
                      over=Over.WORST),
              Figure("tokens per step of prompt lookup, copied texts", counts.tau, 2.53, over=Over.WORST))),
    embedded("speculation-uncopied", counts.uncopied, counts.NUM_UNCOPIED,
             (Figure("tokens per step of prompt lookup, median of other kinds of text", counts.tau, unit="tokens"),)),
    embedded("speculation-heads", counts.medusa, counts.NUM_HEADS_KINDS,
             (Figure("tokens per step of Medusa heads, median of kinds of text", counts.tau, unit="tokens"),)),
    *map(_history, HISTORY),
    embedded("speculation-history-unrelated", history.unrelated, history.ROUNDS,
             (Figure("throughput with history drafts over without, nothing repeated",
                     partial(speedup, history.ON, history.OFF), 0.99),)),
    large("speculation-speed", speed.measure, speed.ROUNDS,
          (at_most("step of 4 tokens over one of 1", partial(speed.cost, 4), 1.15),
           at_most("step of 8 tokens over one of 1", partial(speed.cost, 8), 1.30),
           at_most("draft token over a step, over the ratio of weights", speed.cost_over_bytes, 1.5),
           Figure("speed-up over what acceptance and costs allow, 1 request", partial(speed.efficiency, 1), 0.90),
           Figure("speed-up over what acceptance and costs allow, 8 requests", partial(speed.efficiency, 8), 0.85),
           Figure("speed-up over the ideal of free verification, 1 request", speed.efficiency_of_bytes, 0.75),
           at_most("8-grams repeated in the timed texts", speed.repeated, 0.2, over=Over.WORST))),
    *(suite for load in speed.LOADS for suite in _schedule(load)),
    embedded("speculation-lookup", lookup.measure, lookup.ROUNDS,
             (Figure("throughput with prompt lookup over without, copy-heavy adapter",
                     partial(speedup, lookup.ON, lookup.OFF), 2.0, unit="×"),), dtype="bfloat16"),
    embedded("speculation-peer", lookup.against_peer, lookup.ROUNDS,
             (Figure("throughput over vLLM with n-grams, copy-heavy adapter", partial(speedup, OURS, VLLM), 2.0,
                     unit="×"),), dtype="bfloat16", peer=VLLM_ON_CPU),
    large("speculation-heads-cost", heads.measure, heads.ROUNDS,
          (at_most("step with three Medusa heads over a plain one", partial(heads.over_plain, "one"), 1.10),
           at_most("step of four requests with four sets of heads over a plain one", partial(heads.over_plain, "four"),
                   1.15))),
)  # fmt: skip


def _pauses(kind: str, what: str, target: float | None) -> Suite:
    num_faults = pauses.FAULTS[kind]
    return embedded_bf16(
        f"recovery-{kind}", partial(pauses.measure, kind), num_faults // pauses.PER_CASE,
        (at_most(f"longest pause of a stream, {what.format(num_faults)}", faults.longest_gap, target, unit="s",
                 over=Over.WORST),),
    )  # fmt: skip


RECOVERY = (
    _pauses("kill", "shard killed {} times", 1.0),
    _pauses("stop", "shard stopped {} times", 3.0),
    _pauses("roll", "{} rolling restarts", None),
)

SUITES: tuple[Suite, ...] = (*SERVING, *ADAPTERS, *SPECULATION, *RECOVERY)

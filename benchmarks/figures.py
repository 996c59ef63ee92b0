"""All suites of figures that are published, with their targets."""

from functools import partial

from benchmarks.adapters import activated, cost, fairness, goodput, loading, tiers
from benchmarks.evidence.figure import Figure, Over, Suite, raw_value
from benchmarks.grammar import cost as constrained
from benchmarks.grammar import peer as structured
from benchmarks.load.peers import INFINITY_VERSION, SENTENCE_TRANSFORMERS_VERSION, VLLM_VERSION
from benchmarks.load.rounds import OURS, VLLM, first_token, speedup
from benchmarks.serving import (
    closed_loop,
    embeddings,
    llama_cpp,
    open_loop,
    overload,
    pauses,
    router,
    start,
    transformers_peer,
)
from benchmarks.speculation import counts, heads, history, learning, lookup, speed
from tests.endurance import faults

at_most = partial(Figure, at_least=False)
embedded = partial(Suite, model="embedded model", dtype="float32")
embedded_bf16 = partial(embedded, dtype="bfloat16")
large = partial(Suite, model="random Llama, 200 M", dtype="bfloat16")
simulated = partial(Suite, model="simulated shard")
LLAMA_CPP = f"llama.cpp of llama-cpp-python {llama_cpp.VERSION}"
VLLM_ON_CPU = f"vLLM {VLLM_VERSION} (CPU)"

TARGET_SHARE = {1: 0.72, 8: 0.80, 32: 0.80}
OVER_VLLM = {1: 1.4, 8: 1.3, 32: 1.25}
FIRST_TOKEN_OVER_VLLM = {32: 1.0}
OVER_LLAMA_CPP: dict[int, dict[str, float | None]] = {
    1: {"int8": 1.6, "int4": 1.4},
    8: {"int8": 2.8, "int4": 1.7},
    32: {"int8": None, "int4": 1.7},
}
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
    large("open", open_loop.measure, 1,
          tuple(Figure(f"highest request rate with p99 time to first token within 2 s, {name}",
                       partial(open_loop.highest_rate, name), unit="requests/s", over=Over.WORST)
                for name in (OURS, VLLM)) +
          (Figure("highest request rate with p99 time to first token within 2 s, over vLLM", open_loop.over_vllm,
                  1.25, unit="×", over=Over.WORST),), peer=VLLM_ON_CPU),
    large("transformers", transformers_peer.measure, transformers_peer.ROUNDS,
          (Figure("throughput over transformers continuous batching", transformers_peer.over_transformers, 4.0,
                  unit="×"),), peer="transformers"),
    embedded_bf16("start", start.measure, start.ROUNDS,
                  (at_most("second start of the embedded model", partial(raw_value, "ready_s"), 10.0, unit="s"),
                   at_most("second start over its imports", partial(raw_value, "ready_over_imports"), 1.2, unit="×"),
                   at_most("memory of all processes, no adapter", partial(raw_value, "pss_mib"), 650, unit="MiB"),
                   at_most("answer after the shard was killed", partial(raw_value, "recovery_s"), 2.0, unit="s"))),
    large("overload", overload.measure, overload.ROUNDS,
          (at_most("p99 of rejections beyond capacity", overload.refusal_p99, 10.0, unit="ms"),
           Figure("throughput during a flood of further requests, over without", overload.goodput, 0.9))),
)  # fmt: skip
"""Whole servers."""

ROUTER = (
    simulated("router", router.measure, router.ROUNDS,
              (Figure("router throughput, 256 streams", partial(raw_value, "tokens_per_second"), 40_000,
                      unit="tokens/s"),
               at_most("time to first token added by the router, 64 clients", router.added_first_token_ms, 5.0,
                       unit="ms"))),
    simulated("router-shards", router.measure_shards, router.ROUNDS,
              (Figure("throughput of one router over four shards, of four times one", router.share, 0.9),),
              model="simulated shards"),
)  # fmt: skip
"""The router by itself."""

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
    embedded("learning-switch", learning.measure, 1,
             (Figure("tokens per step of heads learned while serving over those trained offline, traffic switched",
                     learning.over_offline, 0.85, over=Over.WORST),
              at_most("p99 time per token with learning over without, half of capacity", learning.p99_ratio, 1.05,
                      over=Over.WORST),
              Figure("throughput with learning over without, half of capacity",
                     partial(speedup, learning.ON, learning.OFF), 0.97, over=Over.WORST),
              at_most("texts that learning changed", partial(raw_value, "differing_texts"), 0.0, over=Over.WORST),
              Figure("processor that trainings got", learning.trainer_share, over=Over.WORST))),
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

GRAMMAR = (
    large("grammar-steps", constrained.steps, constrained.ROUNDS,
          (at_most("step with 8 constrained requests over 8 others", constrained.over_plain, 1.06),)),
    large("grammar-first", constrained.first_tokens, constrained.ROUNDS,
          (at_most("time to first token with a new schema over without", constrained.over_plain, 1.15),)),
    large("grammar-neighbours", constrained.neighbours, constrained.ROUNDS,
          (at_most("p99 time between tokens next to schemas that use up their limit, over without",
                   constrained.p99_over_calm, 1.1, over=Over.POOLED),)),
    large("grammar-peer", structured.measure, structured.ROUNDS,
          (Figure("structured output over vLLM, 8 clients with 8 schemas", structured.over_vllm, 1.3, unit="×"),
           Figure("valid share of finished outputs, Lorikeet", partial(structured.valid_share, OURS), 1.0,
                  over=Over.WORST),
           Figure("valid share of finished outputs, vLLM", partial(structured.valid_share, VLLM), over=Over.WORST)),
          peer=VLLM_ON_CPU),
)  # fmt: skip
"""Structured output."""

EMBEDDINGS = (
    Suite("embeddings-throughput", embeddings.measure, embeddings.ROUNDS,
          (Figure("embeddings over sentence-transformers at its best batch size", embeddings.over_sentence_transformers,
                  1.3, unit="×"),
           Figure("embeddings over infinity, 8 clients", embeddings.over_infinity, 1.0, unit="×")),
          "random BERT, 13 M", "float32",
          f"sentence-transformers {SENTENCE_TRANSFORMERS_VERSION}, infinity {INFINITY_VERSION}"),
)  # fmt: skip


def _next_to_llama_cpp(clients: int) -> Suite:
    figures = tuple(
        Figure(f"{ours} over llama.cpp's {theirs}, {_clients(clients)}", partial(speedup, ours, theirs),
               OVER_LLAMA_CPP[clients][ours], unit="×")
        for ours, theirs in llama_cpp.PAIRS.items()
    )  # fmt: skip
    return large(f"llama-cpp-{clients}", partial(llama_cpp.measure, clients), llama_cpp.ROUNDS, figures,
                 dtype="int8, int4", peer=LLAMA_CPP)  # fmt: skip


LLAMA_CPP_SUITES = (
    *map(_next_to_llama_cpp, OVER_LLAMA_CPP),
    large("llama-cpp-adapters", llama_cpp.adapters, llama_cpp.ROUNDS,
          (Figure("8 adapters in bfloat16 over llama.cpp", partial(speedup, "bfloat16", "BF16"), 4.0, unit="×"),
           Figure("8 adapters in int8 over llama.cpp's Q8_0", partial(speedup, "int8", "Q8_0"), 4.0, unit="×")),
          dtype="bfloat16, int8", peer=LLAMA_CPP),
)  # fmt: skip

SUITES: tuple[Suite, ...] = (
    *SERVING, *ROUTER, *ADAPTERS, *SPECULATION, *RECOVERY, *GRAMMAR, *EMBEDDINGS, *LLAMA_CPP_SUITES,
)  # fmt: skip

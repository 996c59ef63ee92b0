"""The figures of speculative decoding."""

from functools import partial

from benchmarks.evidence.figure import Figure, Over, Suite, raw_value
from benchmarks.load.peers import VLLM_VERSION
from benchmarks.load.rounds import OURS, VLLM, speedup
from benchmarks.speculation import counts, heads, history, learning, lookup, speed

most = partial(Figure, at_least=False)
embedded = partial(Suite, model="embedded model", dtype="float32")
timed = partial(Suite, model="random Llama, 200 M", dtype="bfloat16")


def _schedule(load: int) -> tuple[Suite, Suite]:
    """Under one load: schedule auto against the best fixed width, and the cost of drafts that are never accepted."""
    ratio = partial(partial, speedup)
    return (
        timed(f"speculation-schedule-{load}", partial(speed.schedules, load), speed.SCHEDULE_ROUNDS,
              (Figure(f"schedule auto over the best fixed draft length, {load} at once",
                      ratio(speed.AUTO, speed.FIXED), 0.98),)),
        timed(f"speculation-rejected-{load}", partial(speed.rejected, load), speed.ROUNDS,
              (Figure(f"schedule auto over off, nothing accepted, {load} at once", ratio(speed.REJECTED, speed.OFF),
                      0.97),
               Figure(f"one request above the batch limit of speculation, over off, {load} at once",
                      ratio(speed.LIMITED, speed.OFF), 0.97))),
    )  # fmt: skip


HISTORY = {history.ALL: 2.0, history.HALF: 1.5, history.NONE: 1.0}
"""Targets by the part of requests that repeat an earlier prompt."""


def _history(workload: str) -> Suite:
    name = f"tokens per step of history drafts over prompt lookup, {workload} of the prompts repeated"
    return embedded(f"speculation-history-{workload}", partial(history.measure, workload), len(history.TEMPERATURES),
                    (Figure(name, history.gain, HISTORY[workload], over=Over.WORST),))  # fmt: skip


SUITES: tuple[Suite, ...] = (
    embedded("speculation-copied", counts.copied, len(counts.LOOKUP_WIDTHS),
             (Figure("tokens per step of prompt lookup over LoRAX's rule, copied texts", counts.over_lorax, 1.08,
                     over=Over.WORST),
              most("rows drafted by prompt lookup over LoRAX's rule, copied texts", counts.rows_over_lorax, 0.9,
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
              most("p99 time per token with learning over without, half of capacity", learning.p99_ratio, 1.05,
                   over=Over.WORST),
              Figure("throughput with learning over without, half of capacity",
                     partial(speedup, learning.ON, learning.OFF), 0.97, over=Over.WORST),
              most("texts that learning changed", partial(raw_value, "differing_texts"), 0.0, over=Over.WORST),
              Figure("processor that trainings got", learning.trainer_share, over=Over.WORST))),
    timed("speculation-speed", speed.measure, speed.ROUNDS,
          (most("step of 4 tokens over one of 1", partial(speed.cost, 4), 1.15),
           most("step of 8 tokens over one of 1", partial(speed.cost, 8), 1.30),
           most("draft token over a step, over the ratio of weights", speed.cost_over_bytes, 1.5),
           Figure("speed-up over what acceptance and costs allow, 1 request", partial(speed.efficiency, 1), 0.90),
           Figure("speed-up over what acceptance and costs allow, 8 requests", partial(speed.efficiency, 8), 0.85),
           Figure("speed-up over the ideal of free verification, 1 request", speed.efficiency_of_bytes, 0.75),
           most("8-grams repeated in the timed texts", speed.repeated, 0.2, over=Over.WORST))),
    *(suite for load in speed.LOADS for suite in _schedule(load)),
    embedded("speculation-lookup", lookup.measure, lookup.ROUNDS,
             (Figure("throughput with prompt lookup over without, copy-heavy adapter",
                     partial(speedup, lookup.ON, lookup.OFF), 2.0, unit="×"),), dtype="bfloat16"),
    embedded("speculation-lookup-int8", partial(lookup.measure, None, "--quantize", "int8"), lookup.ROUNDS,
             (Figure("throughput with prompt lookup over without, copy-heavy adapter, int8",
                     partial(speedup, lookup.ON, lookup.OFF), 2.5, unit="×"),), dtype="int8"),
    embedded("speculation-peer", lookup.against_peer, lookup.ROUNDS,
             (Figure("throughput over vLLM with n-grams, copy-heavy adapter", partial(speedup, OURS, VLLM), 2.0,
                     unit="×"),), dtype="bfloat16", peer=f"vLLM {VLLM_VERSION} (CPU)"),
    timed("speculation-heads-cost", heads.measure, heads.ROUNDS,
          (most("step with three Medusa heads over a plain one", partial(heads.over_plain, "one"), 1.10),
           most("step of four requests with four sets of heads over a plain one", partial(heads.over_plain, "four"),
                1.15))),
)  # fmt: skip

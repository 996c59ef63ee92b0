"""The figures of whole servers."""

from functools import partial

from benchmarks.evidence.figure import Figure, Over, Suite, raw_value
from benchmarks.load.peers import VLLM_VERSION
from benchmarks.load.rounds import OURS, VLLM, first_token, speedup
from benchmarks.serving import closed_loop, open_loop, overload, start, transformers_peer

TARGET_SHARE = {1: 0.72, 8: 0.80, 32: 0.80}
OVER_VLLM = {1: 1.4, 8: 1.3, 32: 1.25}
FIRST_TOKEN_OVER_VLLM = {32: 1.0}
"""Targets by clients."""

served = partial(Suite, model="random Llama, 200 M", dtype="bfloat16")
next_to_vllm = partial(served, peer=f"vLLM {VLLM_VERSION} (CPU)")
most = partial(Figure, at_least=False)


def _closed(clients: int) -> Suite:
    word = "client" if clients == 1 else "clients"
    figures = (
        Figure(f"share of the machine's limit, {clients} {word}", closed_loop.share_of_limit, TARGET_SHARE[clients]),
        Figure(f"throughput over vLLM, {clients} {word}", partial(speedup, OURS, VLLM), OVER_VLLM[clients], unit="×"),
        most(f"time to first token over vLLM's, {clients} {word}", partial(first_token, OURS, VLLM),
             FIRST_TOKEN_OVER_VLLM.get(clients)),
    )  # fmt: skip
    return next_to_vllm(
        f"closed-{clients}", partial(closed_loop.measure, clients), closed_loop.ROUNDS, figures, void=closed_loop.void,
    )  # fmt: skip


SUITES: tuple[Suite, ...] = (
    *map(_closed, TARGET_SHARE),
    next_to_vllm("open", open_loop.measure, 1,
                 tuple(Figure(f"highest request rate with p99 time to first token within 2 s, {name}",
                              partial(open_loop.highest_rate, name), unit="requests/s", over=Over.WORST)
                       for name in (OURS, VLLM)) +
                 (Figure("highest request rate with p99 time to first token within 2 s, over vLLM", open_loop.over_vllm,
                         1.25, unit="×", over=Over.WORST),)),
    served("transformers", transformers_peer.measure, transformers_peer.ROUNDS,
           (Figure("throughput over transformers continuous batching", transformers_peer.over_transformers, 4.0,
                   unit="×"),), peer="transformers"),
    Suite("start", start.measure, start.ROUNDS,
          (most("second start of the embedded model", partial(raw_value, "ready_s"), 10.0, unit="s"),),
          "embedded model", "bfloat16"),
    served("overload", overload.measure, overload.ROUNDS,
           (most("p99 of rejections beyond capacity", overload.refusal_p99, 10.0, unit="ms"),
            Figure("throughput during a flood of further requests, over without", overload.goodput, 0.9))),
)  # fmt: skip

"""The figures of structured output."""

from functools import partial

from benchmarks.evidence.figure import Figure, Over, Suite
from benchmarks.grammar import cost, peer
from benchmarks.load.peers import VLLM_VERSION
from benchmarks.load.rounds import OURS, VLLM

LLAMA = "random Llama, 200 M"

SUITES: tuple[Suite, ...] = (
    Suite("grammar-steps", cost.steps, cost.ROUNDS,
          (Figure("step with 8 constrained requests over 8 others", cost.over_plain, 1.06, at_least=False),),
          LLAMA, "bfloat16"),
    Suite("grammar-first", cost.first_tokens, cost.ROUNDS,
          (Figure("time to first token with a new schema over without", cost.over_plain, 1.15, at_least=False),),
          LLAMA, "bfloat16"),
    Suite("grammar-neighbours", cost.neighbours, cost.ROUNDS,
          (Figure("p99 time between tokens next to schemas that use up their limit, over without", cost.p99_over_calm,
                  1.1, at_least=False, over=Over.POOLED),),
          LLAMA, "bfloat16"),
    Suite("grammar-peer", peer.measure, peer.ROUNDS,
          (Figure("structured output over vLLM, 8 clients with 8 schemas", peer.over_vllm, 1.3, unit="×"),
           Figure("valid share of finished outputs, Lorikeet", partial(peer.valid_share, OURS), 1.0, over=Over.WORST),
           Figure("valid share of finished outputs, vLLM", partial(peer.valid_share, VLLM), over=Over.WORST)),
          LLAMA, "bfloat16", f"vLLM {VLLM_VERSION} (CPU)"),
)  # fmt: skip

"""The figures of rounded weights."""

from functools import partial

from benchmarks.evidence.figure import Figure, Over, Suite
from benchmarks.load.rounds import speedup
from benchmarks.quantization import served, weights
from benchmarks.quantization.weights import PLAIN

SUITES: tuple[Suite, ...] = (
    Suite("quantization-step", weights.steps, weights.ROUNDS,
          (Figure("decode step of one request in bfloat16 over int8", partial(weights.speedup, "int8"), 1.8, unit="×"),
           Figure("decode step of one request in bfloat16 over int4", partial(weights.speedup, "int4"), 2.8, unit="×")),
          "random Llama, 200 M", "bfloat16"),
    Suite("quantization-served", served.measure, served.ROUNDS,
          (Figure("throughput with int8 over bfloat16, 1 client", partial(speedup, "int8", PLAIN), 1.6, unit="×"),
           Figure("throughput with int4 over bfloat16, 1 client", partial(speedup, "int4", PLAIN), 2.3, unit="×")),
          "random Llama, 200 M", "bfloat16"),
    Suite("quantization-perplexity", weights.perplexities, 1,
          (Figure("perplexity with int8 over bfloat16", partial(weights.perplexity_ratio, "int8"), over=Over.WORST),
           Figure("perplexity with int4 over bfloat16", partial(weights.perplexity_ratio, "int4"), over=Over.WORST)),
          "embedded model", "bfloat16"),
)  # fmt: skip

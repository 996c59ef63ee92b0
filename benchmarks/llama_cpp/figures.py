"""The figures next to llama.cpp."""

from functools import partial

from benchmarks.evidence.figure import Figure, Suite
from benchmarks.llama_cpp import served
from benchmarks.llama_cpp.build import VERSION
from benchmarks.load.rounds import speedup

LLAMA = "random Llama, 200 M"
PEER = f"llama.cpp of llama-cpp-python {VERSION}"
TARGETS: dict[int, dict[str, float | None]] = {
    1: {"int8": 1.6, "int4": 1.4},
    8: {"int8": 2.8, "int4": 1.7},
    32: {"int8": None, "int4": 1.7},
}


def _closed(clients: int) -> Suite:
    word = "client" if clients == 1 else "clients"
    figures = tuple(
        Figure(f"{ours} over llama.cpp's {theirs}, {clients} {word}", partial(speedup, ours, theirs),
               TARGETS[clients][ours], unit="×")
        for ours, theirs in served.PAIRS.items()
    )  # fmt: skip
    return Suite(f"llama-cpp-{clients}", partial(served.measure, clients), served.ROUNDS, figures, LLAMA,
                 "int8, int4", PEER)  # fmt: skip


SUITES: tuple[Suite, ...] = (
    *map(_closed, TARGETS),
    Suite("llama-cpp-adapters", served.adapters, served.ROUNDS,
          (Figure("8 adapters in bfloat16 over llama.cpp", partial(speedup, "bfloat16", "BF16"), 4.0, unit="×"),
           Figure("8 adapters in int8 over llama.cpp's Q8_0", partial(speedup, "int8", "Q8_0"), 4.0, unit="×")),
          LLAMA, "bfloat16, int8", PEER),
)  # fmt: skip

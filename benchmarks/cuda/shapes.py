"""The shapes that kernels are measured with. Imports no torch."""

from dataclasses import dataclass

from benchmarks.cuda.setup import Setup


@dataclass(frozen=True)
class Step:
    """So many requests with so many new tokens each, that see `context` tokens in all."""

    requests: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        kind = "decode" if self.tokens == 1 else "prefill" if self.requests == 1 else "verification"
        return f"{kind} {self.requests} x {self.tokens} in {self.context}"


def steps(setup: Setup) -> list[Step]:
    """Decode alone, under a small load and in a full batch; verification; one long chunk of a prompt."""
    loads = sorted({1, min(8, setup.requests), setup.requests})
    found = []
    for context in setup.contexts:
        found += [Step(load, 1, context) for load in loads]
        found += [Step(min(8, setup.requests), setup.width + 1, context)]
        found += [Step(1, min(setup.prefill, context), context)]
    return found


def module_shapes(setup: Setup) -> list[tuple[int, int, int]]:
    """(inputs, outputs, requests) of modules with adapters."""
    hidden, mlp = setup.large.hidden, setup.large.mlp
    loads = sorted({8, setup.requests}) if setup.is_cuda else [2]
    return [(*sizes, load) for sizes in ((hidden, hidden), (hidden, mlp), (mlp, hidden)) for load in loads]

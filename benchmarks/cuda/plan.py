"""The bars on a CUDA device and the parts that measure them: one table each. Importing it imports no torch, so that
what is measured can be listed anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.case import Bar, Cases, Over, Part, Raw, raw_value
from benchmarks.cuda import exact, shapes
from benchmarks.cuda.setup import LlamaShape, Setup
from benchmarks.exactness import NUM_ADAPTED, NUM_ARCHITECTURES, differences, logprob_error

HEADS_BOUND, VERIFICATION_BOUND = 1.08, 1.10


@dataclass(frozen=True)
class Plan:
    """What one setup gives."""

    parts: tuple[Part, ...]
    bars: tuple[Bar, ...]

    def bars_of(self, part: Part) -> list[Bar]:
        return [bar for bar in self.bars if bar.part == part.name]


def group_of(part: Part) -> str:
    """Parts whose names begin alike run in one process and have one file of results."""
    return part.name.partition("-")[0]


def plan(setup: Setup) -> Plan:
    """Parts in the order in which they are best run: what others lean on first."""
    tables = (_bandwidth, _decode, _adapters, _swap, _exact, _speculation, _start, _kernels)
    parts, bars = zip(*(table(setup) for table in tables), strict=True)
    return Plan(tuple(part for some in parts for part in some), tuple(bar for some in bars for bar in some))


Table = tuple[list[Part], list[Bar]]


def _later(name: str, setup: Setup, *more: Any) -> Callable[[frozenset[str]], Cases]:
    """`module.function` of this package, imported when it runs."""
    module, _, function = name.partition(".")

    def measure(finished: frozenset[str]) -> Cases:
        yield from getattr(import_module(f"benchmarks.cuda.{module}"), function)(setup, *more, finished)

    return measure


def _of(name: str, *bound: Any) -> Callable[[Raw], float]:
    """A figure by `module.function`, imported when it is worked out."""
    module, _, function = name.partition(".")

    def value(raw: Raw) -> float:
        return float(getattr(import_module(f"benchmarks.cuda.{module}"), function)(*bound, raw))

    return value


def _part(name: str, setup: Setup, measure: str, *more: Any) -> Part:
    return Part(name, _later(measure, setup, *more), setup.told())


def _bandwidth(setup: Setup) -> Table:
    told = partial(Bar, part="bandwidth", num_cases=setup.rounds, wanted=None)
    rows = 64 if setup.is_cuda else 4
    return [_part("bandwidth", setup, "speeds.measure")], [
        told("bandwidth of a copy within the card", value=_of("speeds.giga", "copy"), unit="GB/s"),
        told("bandwidth of a sum over its memory", value=_of("speeds.giga", "read"), unit="GB/s"),
        told("copy from page-locked host memory", value=_of("speeds.giga", "upload"), unit="GB/s"),
        told("best matrix product of the model's shapes", value=_of("speeds.tera"), unit="TFLOP/s"),
        told(f"slowest matrix product of {rows} rows", value=_of("speeds.rate_of_rows", rows), unit="TFLOP/s"),
    ]


def _decode(setup: Setup) -> Table:
    floor = partial(Bar, part="decode-floor", num_cases=setup.rounds)
    many = setup.requests
    return [
        _part("decode-floor", setup, "decode.measure"),
        _part("decode-peer", setup, "decode.against_peer"),
    ], [
        floor("the floor over a step, 1 request", value=_of("decode.share_of_floor", 1), wanted=0.85),
        floor(f"the floor over a step, {many} requests", value=_of("decode.share_of_floor", many), wanted=0.75),
        floor("a step of 1 request", value=_of("decode.milliseconds", 1), wanted=None, unit="ms"),
        floor(f"a step of {many} requests", value=_of("decode.milliseconds", many), wanted=None, unit="ms"),
        Bar(f"times transformers continuous batching, {many} requests", "decode-peer", setup.long_rounds,
            _of("decode.over_peer"), 3.0),
    ]  # fmt: skip


def _adapters(setup: Setup) -> Table:
    bar = partial(Bar, part="adapters", num_cases=setup.long_rounds)

    def share(way: str, of: str = "bare") -> Callable[[Raw], float]:
        return _of("mixes.share", way, of)

    many = setup.requests
    return [_part("adapters", setup, "mixes.measure")], [
        bar(f"{many} requests with as many adapters over none", value=share("distinct"), wanted=0.92),
        bar("the same with ranks mixed", value=share("mixed ranks"), wanted=0.88),
        bar(f"{setup.adapters} adapters in rotation over {many} that stay", value=share("rotation", "resident"),
            wanted=0.90),
        bar("without an adapter, where adapters are served", value=share("idle"), wanted=0.99),
    ]  # fmt: skip


def _swap(setup: Setup) -> Table:
    bar = partial(Bar, part="swap", num_cases=setup.rounds, at_least=False)
    return [_part("swap", setup, "swap.measure")], [
        bar("the longest step beside a swap over a quiet one", value=_of("swap.lengthening"), wanted=1.05),
        bar("the longest of all over a usual step", value=_of("swap.longest"), wanted=None),
        bar("first token later for an adapter in host memory", value=_of("swap.later_ms"), wanted=20.0, unit="ms"),
    ]


def _exact(setup: Setup) -> Table:
    num_plain = len(setup.architectures) or NUM_ARCHITECTURES
    num_adapted = len(setup.architectures) or NUM_ADAPTED
    none = partial(Bar, wanted=0, at_least=False, over=Over.SUM)
    told = partial(Bar, wanted=None, at_least=False, over=Over.SUM)
    worst = partial(Bar, at_least=False, over=Over.WORST)
    ways = 3 if setup.is_smoke else 10
    return [
        _part("exact-tests", setup, "exact.tests"),
        _part("exact-architectures", setup, "exact.architectures"),
        _part("exact-adapters", setup, "exact.adapters"),
        _part("exact-lossless", setup, "lossless.measure"),
        _part("exact-logits", setup, "logits.measure", "every"),
        _part("exact-fp8", setup, "logits.measure", "fp8"),
    ], [
        none("failed tests of kernels", "exact-tests", exact.num_test_cases(setup), exact.num_failed),
        none("greedy texts unlike transformers'", "exact-architectures", num_plain, differences),
        told("of them ties", "exact-architectures", num_plain, exact.ties),
        worst("largest error of a log probability", "exact-architectures", num_plain, logprob_error, None),
        none("texts under adapters unlike PEFT's", "exact-adapters", num_adapted, differences),
        told("of these ties", "exact-adapters", num_adapted, exact.ties),
        none("greedy texts that guessing changes", "exact-lossless", ways, partial(raw_value, "changed")),
        told("ties among them", "exact-lossless", ways, partial(raw_value, "ties")),
        worst("share of drawn texts that guessing changes", "exact-lossless", ways, _of("lossless.share_of_sampled"),
              0.01),
        worst("largest difference of a logit by any kernel, over the largest logit", "exact-logits", 3,
              _of("logits.worst"), 2.0**-5),
        worst("the same with KV in fp8", "exact-fp8", 1, _of("logits.worst"), None),
    ]  # fmt: skip


def _speculation(setup: Setup) -> Table:
    parts: list[Part] = []
    bars: list[Bar] = []
    pairs: dict[str, tuple[LlamaShape, LlamaShape]] = {
        "large": (setup.large, setup.small),
        "small": (setup.small, setup.draft),
    }
    for which, models in pairs.items():
        name = f"speculation-{which}"
        parts.append(_part(name, setup, "guessing.measure", models))
        bars += _guessing_bars(setup, name, f"{which} model")
    return parts, bars


def _guessing_bars(setup: Setup, part: str, whose: str) -> list[Bar]:
    bar = partial(Bar, part=part, num_cases=setup.long_rounds)
    most = partial(bar, at_least=False)
    return [
        most(f"verification of {setup.width} guesses over a plain step, {whose}", value=_of("guessing.cost"),
             wanted=VERIFICATION_BOUND),
        most(f"a step with three Medusa heads over one as wide without, {whose}", value=_of("guessing.heads_cost"),
             wanted=HEADS_BOUND),
        most(f"all of a step with heads over a plain one, {whose}", value=_of("guessing.heads_step"), wanted=None),
        most(f"a draft's token over a step, over the ratio of weights, {whose}", value=_of("guessing.draft_cost"),
             wanted=None),
        *(
            each
            for load in setup.loads
            for each in (
                bar(f"η, {load} at once, {whose}", value=_of("guessing.efficiency", load), wanted=0.92),
                bar(f"τ, {load} at once, {whose}", value=_of("guessing.tau", load), wanted=None, unit="tokens"),
                bar(f"times faster, {load} at once, {whose}", value=_of("guessing.times", load), wanted=None),
            )
        ),
        bar(f"schedule auto over off under the worst load, {whose}",
            value=_of("guessing.worst_schedule", setup.loads), wanted=0.98),
    ]  # fmt: skip


def _start(setup: Setup) -> Table:
    num_starts = 1 if setup.is_smoke else 2
    bar = partial(Bar, part="start", num_cases=num_starts, at_least=False, unit="s", over=Over.WORST)
    return [_part("start", setup, "start.measure")], [
        bar("start of a shard to ready, from local disk", value=partial(raw_value, "ready_s"), wanted=60.0),
        bar("capture of all graphs", value=_of("start.capture_s"), wanted=30.0),
    ]


def _kernels(setup: Setup) -> Table:
    attention = partial(Bar, part="kernels-attention", num_cases=len(shapes.steps(setup)), wanted=None)
    gaps = partial(Bar, part="kernels-gaps", num_cases=2, wanted=None, at_least=False, unit="µs")
    ways = {"eager": "without graphs", "unfused": "without fusions", "fp8": "with KV in fp8"}
    batches = (1, setup.requests)
    return [
        _part("kernels-attention", setup, "attention.measure"),
        _part("kernels-adapters", setup, "kernels.adapters"),
        _part("kernels-gaps", setup, "kernels.gaps"),
        *(_part(f"kernels-{way}", setup, "kernels.way", way) for way in ways),
    ], [
        attention("attention: triton's time over varlen's", value=_of("attention.triton_over_varlen"), unit="times"),
        attention("attention: the floor over the faster one's time", value=_of("attention.share_of_floor"),
                  unit="of it"),
        Bar("adapters: grouped products' time over the kernels'", "kernels-adapters", len(shapes.module_shapes(setup)),
            _of("kernels.over_kernels"), None, unit="times"),
        gaps("the device's wait for the host between steps", value=_of("kernels.microseconds", "gap")),
        gaps("time of a step in which nothing runs", value=_of("kernels.microseconds", "idle_per_step")),
        *(
            Bar(f"a step {text} over a usual one, {batch} at once", f"kernels-{way}", setup.long_rounds,
                _of("kernels.worth", way, batch), None)
            for way, text in ways.items()
            for batch in batches
        ),
    ]  # fmt: skip

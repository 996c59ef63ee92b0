"""Distributions that are written on a command line: lengths, adapters, and the times of arrivals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

ADAPTER_DISTRIBUTIONS = ("zipf", "uniform", "distinct", "trace")
_FORMS = "128, uniform:64-256, normal:128,32, lognormal:128,2 (median, factor) or exponential:128"


@dataclass(frozen=True)
class Length:
    """A distribution of lengths; draws are at least 1."""

    text: str
    """As it was written."""
    _draw: Callable[[Generator, int], np.ndarray]

    def draw(self, generator: Generator, count: int) -> list[int]:
        # [count]
        drawn = self._draw(generator, count)
        return [max(1, round(float(value))) for value in drawn]

    @classmethod
    def read(cls, text: str) -> "Length":
        """Raises ValueError with a sentence."""
        name, colon, rest = text.partition(":")
        try:
            if not colon:
                fixed = int(text)
                return cls(text, lambda generator, count: np.full(count, fixed))
            first, *others = (float(part) for part in rest.replace("-", ",").split(","))
            made = _DRAWS[name](first, *others)
        except (KeyError, ValueError, TypeError):
            raise ValueError(f"{text!r} is not a length: write {_FORMS}") from None
        return cls(text, made)


def _uniform(low: float, high: float) -> Callable[[Generator, int], np.ndarray]:
    if low > high:
        raise ValueError
    return lambda generator, count: generator.integers(int(low), int(high) + 1, count)


def _normal(mean: float, deviation: float) -> Callable[[Generator, int], np.ndarray]:
    return lambda generator, count: generator.normal(mean, deviation, count)


def _lognormal(median: float, factor: float) -> Callable[[Generator, int], np.ndarray]:
    return lambda generator, count: generator.lognormal(math.log(median), math.log(factor), count)


def _exponential(mean: float) -> Callable[[Generator, int], np.ndarray]:
    return lambda generator, count: generator.exponential(mean, count)


_DRAWS: dict[str, Callable[..., Callable[[Generator, int], np.ndarray]]] = {
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "exponential": _exponential,
}


def adapters(
    distribution: str, names: Sequence[str], count: int, generator: Generator, exponent: float
) -> list[str | None]:
    """The adapter of each of `count` requests, None for the base model where there are no names.

    `zipf`: the k-th name has weight 1 / k ** exponent. `distinct`: one after another, each used as often as the others.
    """
    if not names:
        return [None] * count
    if distribution == "distinct":
        return [names[index % len(names)] for index in range(count)]
    # [len(names)]
    weights = np.arange(1, len(names) + 1, dtype=float) ** -(exponent if distribution == "zipf" else 0.0)
    chosen = generator.choice(len(names), size=count, p=weights / weights.sum())
    return [names[index] for index in chosen]


def arrivals(rate: float, burstiness: float, count: int, generator: Generator) -> list[float]:
    """Seconds from the start at which each request arrives; all at once for an infinite rate.

    Gaps have a gamma distribution of shape `burstiness` and mean 1 / rate; shape 1 is a Poisson process, an infinite
    one sends at constant distances.
    """
    if math.isinf(rate):
        return [0.0] * count
    # [count]
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    return [float(value) for value in np.cumsum(gaps)]

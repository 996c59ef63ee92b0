"""`lorikeet-bench compare A.json B.json`: two results side by side, with intervals if both list their requests."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from lorikeet.launcher.bench.result import Result

_ROWS = {
    "request_throughput": ("Request throughput (req/s)", True),
    "request_goodput": ("Request goodput (req/s)", True),
    "output_throughput": ("Output token throughput (tok/s)", True),
    "median_ttft_ms": ("Median TTFT (ms)", False),
    "p99_ttft_ms": ("P99 TTFT (ms)", False),
    "median_tpot_ms": ("Median TPOT (ms)", False),
    "median_itl_ms": ("Median ITL (ms)", False),
    "p99_itl_ms": ("P99 ITL (ms)", False),
    "median_e2el_ms": ("Median E2EL (ms)", False),
    "spec_decode_acceptance_length": ("Acceptance length", True),
}
"""By key: the label, and whether more is better."""
_MEDIANS: dict[str, tuple[tuple[str, ...], Callable[..., Sequence[float]]]] = {
    "median_ttft_ms": (("ttfts",), lambda ttft: [ttft]),
    "median_tpot_ms": (
        ("ttfts", "latencies", "output_lens"),
        lambda ttft, latency, count: [(latency - ttft) / (count - 1)] if count > 1 else [],
    ),
    "median_itl_ms": (("itls",), lambda gaps: gaps),
    "median_e2el_ms": (("latencies",), lambda latency: [latency]),
}
"""By key: which values of a request its own ones are computed from, and how."""
_NEEDED = ("completed", "request_throughput")
"""Every result of this program and of `vllm bench serve` has them."""
_DRAWS, _MAX_VALUES = 2000, 50_000_000
"""Draws of a bootstrap; fewer if together they had more values than this, but at least a tenth."""


def read(path: Path) -> Result:
    """A result of --result, or of `vllm bench serve --save-result`. Raises ValueError with a sentence, or OSError."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or not all(_is_number(result.get(key)) for key in _NEEDED):
        raise ValueError(f"{path} is not a result of `lorikeet-bench run --result`: it has no {' or '.join(_NEEDED)}")
    for key in _ROWS:
        if result.get(key) is not None and not _is_number(result[key]):
            raise ValueError(f"{path} is not a result: {key} is {str(result[key])[:40]!r}")
    lists = [result[key] for key in _ARRAYS if key in result]
    if not all(isinstance(values, list) and len(values) == len(lists[0]) for values in lists):
        raise ValueError(f"{path} is not a result: {', '.join(_ARRAYS)} are not lists of one length")
    return result


_ARRAYS = ("errors", *sorted({name for names, _ in _MEDIANS.values() for name in names}))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compared(first: Result, second: Result) -> str:
    """A table of both, the ratio of the second to the first, and what it means."""
    return "\n".join(_lines(first, second))


def _lines(first: Result, second: Result) -> Iterator[str]:
    yield f"{'':34}{'A':>12}{'B':>12}{'B / A':>9}  95 % interval"
    for key, (label, more_is_better) in _ROWS.items():
        a, b = first.get(key), second.get(key)
        if a is None or b is None:
            continue
        line = f"{label:34}{a:12.2f}{b:12.2f}{b / a if a else float('nan'):9.3f}"
        interval = _interval(first, second, key)
        if interval is None:
            yield line
            continue
        low, high = interval
        better, worse = ("better", "worse") if more_is_better else ("worse", "better")
        meaning = better if low > 1 else worse if high < 1 else "no difference shown"
        yield f"{line}  {low:.3f} – {high:.3f}, {meaning}"
    for name in ("failed", "completed"):
        if name in first and name in second:
            yield f"{name.capitalize() + ' requests':34}{first[name]:12}{second[name]:12}"


def _interval(first: Result, second: Result, key: str) -> tuple[float, float] | None:
    """Confidence interval of the ratio of two medians, by bootstrap over requests; None without values per request."""
    if key not in _MEDIANS:
        return None
    names, values_of = _MEDIANS[key]
    if not all(name in result for result in (first, second) for name in ("errors", *names)):
        return None
    generator = np.random.default_rng(0)
    medians = []
    for result in (first, second):
        rows = zip(result["errors"], *(result[name] for name in names), strict=True)
        values = [list(values_of(*row)) for error, *row in rows if not error]
        if sum(map(bool, values)) < 2:
            return None
        medians.append(_medians(values, generator))
    # [at most _DRAWS] each
    a, b = (draws[: min(map(len, medians))] for draws in medians)
    low, high = np.nanpercentile(b / np.where(a == 0, np.nan, a), [2.5, 97.5])
    return (float(low), float(high)) if math.isfinite(low) else None


def _medians(values: Sequence[Sequence[float]], generator: Generator) -> np.ndarray:
    """Medians of all values of requests that are drawn with replacement. The gaps of one request depend on each other,
    so they are drawn together.
    """
    values = [sample for sample in values if sample]
    # [number of values] each: ascending, and the request of each value
    flat, owners = np.concatenate(values), np.repeat(np.arange(len(values)), [len(sample) for sample in values])
    order = np.argsort(flat, kind="stable")
    flat, owners = flat[order], owners[order]
    results = []
    for _ in range(max(_DRAWS // 10, min(_DRAWS, _MAX_VALUES // len(flat)))):
        times = np.bincount(generator.integers(0, len(values), len(values)), minlength=len(values))
        upto = np.cumsum(times[owners])
        middle = [(upto[-1] - 1) // 2, upto[-1] // 2]
        results.append(flat[np.searchsorted(upto, middle, side="right")].mean())
    return np.asarray(results)

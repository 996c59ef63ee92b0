"""`lorikeet-bench compare A.json B.json`: two results side by side, with intervals where both have each request."""

from collections.abc import Callable, Iterator

import numpy as np

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
_MEDIANS: dict[str, Callable[[Result], list[float]]] = {
    "median_ttft_ms": lambda result: _of_good(result, "ttfts"),
    "median_e2el_ms": lambda result: _of_good(result, "latencies"),
}
_DRAWS = 2000


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
        yield f"{name.capitalize() + ' requests':34}{first[name]:12}{second[name]:12}"


def _of_good(result: Result, key: str) -> list[float]:
    return [value for value, error in zip(result[key], result["errors"], strict=True) if not error]


def _interval(first: Result, second: Result, key: str) -> tuple[float, float] | None:
    """Of the ratio of two medians, by bootstrap over requests; None where there are no values per request."""
    read = _MEDIANS.get(key)
    if read is None or not all("errors" in result for result in (first, second)):
        return None
    values = [np.asarray(read(result)) for result in (first, second)]
    if any(len(each) < 2 for each in values):
        return None
    generator = np.random.default_rng(0)
    # [_DRAWS] each
    a, b = (np.median(generator.choice(each, (_DRAWS, len(each))), axis=1) for each in values)
    low, high = np.percentile(b / a, [2.5, 97.5])
    return float(low), float(high)

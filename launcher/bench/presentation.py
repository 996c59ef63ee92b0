"""Shows the result of a load: the block that `vllm bench serve` prints, one HTML file without links to other files or
hosts, CSV, and a comparison of two results (`lorikeet-bench compare A.json B.json`), with intervals if both list their
requests.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from lorikeet.launcher.bench.result import LATENCIES, Result, percentile_word

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 42
_PLOT_STYLE = "text{font:11px system-ui,sans-serif;fill:#777}"
COLOURS = ("#2f7fd1", "#c2410c", "#3f7d20", "#a855c9", "#8a6d00", "#0f766e")
"""Colours whose contrast with white and with black is 3 or more."""

_ROUND = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axes:
    """Names of the axes."""

    title: str
    across: str
    up: str


@dataclass(frozen=True)
class Plot:
    """One figure."""

    title: str
    svg: str = ""
    """Empty if there is nothing to show."""


def lines(axes: Axes, series: dict[str, Points]) -> Plot:
    """One line for each name."""
    points = [point for curve in series.values() for point in curve]
    if not points:
        return Plot(axes.title)
    right, top = _nice(max(x for x, _ in points)), _nice(max(y for _, y in points))
    drawn = [_frame(axes, right, top)]
    for index, (name, curve) in enumerate(series.items()):
        path = " ".join(f"{_x(x / right):.1f},{_y(y / top):.1f}" for x, y in curve)
        colour = COLOURS[index % len(COLOURS)]
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        drawn.append(_label(index, colour, name) if len(series) > 1 else "")
    return _figure(axes, drawn)


def bars(axes: Axes, values: Sequence[tuple[str, float]]) -> Plot:
    """One bar for each pair of name and value, in this order."""
    if not values:
        return Plot(axes.title)
    top = _nice(max(value for _, value in values))
    step = (WIDTH - LEFT - RIGHT) / len(values)
    drawn = [_frame(axes, None, top)]
    for index, (name, value) in enumerate(values):
        x, y = LEFT + index * step, _y(value / top)
        size = f'x="{x + 0.1 * step:.1f}" y="{y:.1f}" width="{0.8 * step:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
        drawn.append(f'<rect {size} fill="{COLOURS[0]}"><title>{escape(name)}: {value:.4g}</title></rect>')
        if len(values) <= 8:
            drawn.append(_text(x + step / 2, HEIGHT - BOTTOM + 16, name[:16], "middle"))
    return _figure(axes, drawn)


def _figure(axes: Axes, drawn: Sequence[str]) -> Plot:
    title = escape(axes.title)
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"'
    return Plot(axes.title, f"<svg {head}><style>{_PLOT_STYLE}</style>{''.join(drawn)}</svg>")


def _frame(axes: Axes, right: float | None, top: float) -> str:
    """Axes with ticks; without numbers across if `right` is None."""
    drawn = [
        f'<path d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>',
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axes.across, "middle"),
        f'<text transform="translate(13,{(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(axes.up)}</text>",
    ]
    for tick in range(5):
        y = _y(tick / 4)
        drawn.append(f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" stroke="#8883"/>')
        drawn.append(_text(LEFT - 6, y + 4, f"{top * tick / 4:.4g}", "end"))
        if right is not None:
            drawn.append(_text(_x(tick / 4), HEIGHT - BOTTOM + 16, f"{right * tick / 4:.4g}", "middle"))
    return "".join(drawn)


def _label(index: int, colour: str, name: str) -> str:
    y = HEIGHT - BOTTOM - 12 - 16 * index  # a distribution leaves this corner free
    line = f'<path d="M{WIDTH - 150},{y - 4}h18" stroke="{colour}" stroke-width="3"/>'
    return line + _text(WIDTH - 126, y, name[:20], "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _nice(value: float) -> float:
    """The next round number: a quarter of it has few digits."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in _ROUND if factor * power >= value * (1 - 1e-9))


_MAX_POINTS = 400
_STYLE = """
:root { color-scheme: light dark; --line: #8884 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } .wide { overflow-x: auto }
pre { border: 1px solid var(--line); padding: 1rem; overflow-x: auto; font-size: 13px }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 1rem }
figure { margin: 0; border: 1px solid var(--line); padding: .75rem } figcaption { font-weight: 600 }
svg { width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 1rem }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left }
"""


def html(result: Result, block: str) -> str:
    """The whole file; `block` is what was printed."""
    date = datetime.strptime(result["date"], "%Y%m%d-%H%M%S")
    title = escape(" · ".join(filter(None, [result["model_id"], f"{date:%Y-%m-%d %H:%M}", result["label"]])))
    figures = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in figures_of(result).items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><h1>{title}</h1>'
        f"<pre>{escape(block)}</pre><main>{figures}</main>{_adapters(result)}</html>\n"
    )


def figures_of(result: Result) -> dict[str, str]:
    """Plots as SVG, by their titles."""
    return {plot.title: plot.svg for plot in _figures(result) if plot.svg}


def _figures(result: Result) -> Iterator[Plot]:
    good = [index for index, error in enumerate(result["errors"]) if not error]
    ttfts = [1000 * result["ttfts"][index] for index in good]
    tiers = result["lorikeet"]["request_tiers"]
    by_tier = {"all requests": ttfts}
    for tier in sorted({tiers[index] for index in good} - {""}):
        by_tier[tier] = [1000 * result["ttfts"][index] for index in good if tiers[index] == tier]
    distributions = {name: shares(ttfts_of_tier) for name, ttfts_of_tier in by_tier.items()}
    yield lines(Axes("Time to first token", "ms", "share of requests"), distributions)
    gaps = [1000 * gap for index in good for gap in result["itls"][index]]
    yield lines(Axes("Inter-token latency", "ms", "share of gaps"), {"": shares(gaps)})
    yield lines(Axes("Output over time", "seconds", "events with tokens per second"), {"": _over_time(result, good)})
    started = [(result["start_times"][index], 1000 * result["ttfts"][index]) for index in good]
    yield lines(Axes("Time to first token by start", "seconds", "ms"), {"": sorted(started)})
    adapters = list(result["lorikeet"]["adapters"].items())
    if len(adapters) > 1:
        requests = [(name, float(values["requests"])) for name, values in adapters]
        yield bars(Axes("Requests by adapter", "adapters, most requested first", "requests"), requests)
        waits = [(name, float(values["median_ttft_ms"])) for name, values in adapters]
        yield bars(Axes("Median time to first token by adapter", "adapters, most requested first", "ms"), waits)
    if (sources := result["lorikeet"]["sources"]) is not None:
        values = [(name, float(value)) for name, value in sources["tokens_per_step"].items()]
        yield bars(Axes("Tokens per step by source", "source", "tokens per step"), values)


def shares(values: Sequence[float]) -> Points:
    """The distribution: the share of values up to each one."""
    # [number of values]
    ordered = np.sort(np.asarray(values, dtype=float))
    picked = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_POINTS)).astype(int))
    return [(float(ordered[index]), (int(index) + 1) / len(ordered)) for index in picked]


def _over_time(result: Result, good: Sequence[int]) -> Points:
    seconds: Counter[int] = Counter()
    for index in good:
        time_s = result["start_times"][index] + result["ttfts"][index]
        for gap in [0.0, *result["itls"][index]]:
            time_s += gap
            seconds[int(time_s)] += 1
    return [(float(second), float(seconds[second])) for second in range(max(seconds, default=-1) + 1)]


def _adapters(result: Result) -> str:
    adapters = result["lorikeet"]["adapters"]
    if len(adapters) < 2:
        return ""
    head = "<tr><th>adapter<th>requests<th>output tokens<th>median TTFT (ms)<th>median E2EL (ms)<th>tokens/s</tr>"
    rows = "".join(
        f"<tr><td>{escape(name)}<td>{values['requests']}<td>{values['output_tokens']}"
        f"<td>{values['median_ttft_ms']:.1f}<td>{values['median_e2el_ms']:.1f}<td>{values['tokens_per_second']:.1f}</tr>"
        for name, values in adapters.items()
    )
    return f'<div class="wide" tabindex="0"><table>{head}{rows}</table></div>'


def table(result: Result) -> str:
    """CSV: one line per request."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = {
        "start_s": "start_times", "queue_s": "queue_times", "ttft_s": "ttfts", "latency_s": "latencies",
        "input_tokens": "input_lens", "output_tokens": "output_lens", "error": "errors",
    }  # fmt: skip
    ours = result["lorikeet"]
    writer.writerow(["request", "adapter", "tier", *columns])
    for index, row in enumerate(zip(*(result[key] for key in columns.values()), strict=True)):
        writer.writerow([index, ours["request_adapters"][index] or "", ours["request_tiers"][index], *row])
    return text.getvalue()


BLOCK_WIDTH = 50
_HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client-side Queueing",
    "e2el_including_client_queue": "Queue-inclusive End-to-end Latency",
}
_SHOWN_ADAPTERS = 5


def block(result: Result, latencies: Sequence[str], percentiles: Sequence[float]) -> str:
    """The printed text; `latencies` are the kinds of latency in it."""
    return "\n".join(_block_lines(result, latencies, percentiles))


def _block_lines(result: Result, latencies: Sequence[str], percentiles: Sequence[float]) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{BLOCK_WIDTH}}"
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if result.get("max_concurrency") is not None:
        yield _line("Maximum request concurrency:", result["max_concurrency"])
    if isinstance(result.get("request_rate"), float):
        yield _line("Request rate configured (RPS):", result["request_rate"])
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", result["request_goodput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    for name in latencies:
        label = LATENCIES[name]
        yield f"{_HEADINGS[name]:-^{BLOCK_WIDTH}}"
        yield _line(f"Mean {label} (ms):", result[f"mean_{name}_ms"])
        yield _line(f"Median {label} (ms):", result[f"median_{name}_ms"])
        for percentile in map(percentile_word, percentiles):
            yield _line(f"P{percentile} {label} (ms):", result[f"p{percentile}_{name}_ms"])
    yield from _speculation(result)
    yield from _ours(result["lorikeet"], result["backend"])
    yield "=" * BLOCK_WIDTH


def _speculation(result: Result) -> Iterator[str]:
    if "spec_decode_num_drafts" not in result:
        return
    yield f"{'Speculative Decoding':-^{BLOCK_WIDTH}}"
    yield _line("Acceptance rate (%):", result["spec_decode_acceptance_rate"])
    yield _line("Acceptance length:", result["spec_decode_acceptance_length"])
    yield _line("Drafts:", result["spec_decode_num_drafts"])
    yield _line("Draft tokens:", result["spec_decode_draft_tokens"])
    yield _line("Accepted tokens:", result["spec_decode_accepted_tokens"])
    if rates := result["spec_decode_per_position_acceptance_rates"]:
        yield "Per-position acceptance (%):"
        for position, rate in enumerate(rates):
            yield _line(f"  Position {position}:", 100 * rate)


def _ours(ours: Result, api: str) -> Iterator[str]:
    if ours["tiers"]:
        yield f"{'Time to First Token by Adapter Tier':-^{BLOCK_WIDTH}}"
        for tier, values in ours["tiers"].items():
            yield _line(f"Median TTFT, {tier} (ms), {values['requests']} requests:", values["median_ttft_ms"])
            yield _line(f"P99 TTFT, {tier} (ms):", values["p99_ttft_ms"])
    if (fairness := ours["fairness"]) is not None:
        yield f"{'Fairness across Adapters':-^{BLOCK_WIDTH}}"
        yield _line("Adapters:", fairness["adapters"])
        yield _line("Jain index of tokens/s per request:", fairness["jain_index_of_speed"])
        yield _line("Slowest over mean tokens/s:", fairness["slowest_over_mean_speed"])
        yield _line("Worst over median TTFT:", fairness["worst_over_median_ttft"])
        for name, values in list(ours["adapters"].items())[:_SHOWN_ADAPTERS]:
            yield _line(f"Median TTFT, {name[:20]} (ms), {values['requests']} req.:", values["median_ttft_ms"])
    if (sources := ours["sources"]) is not None:
        yield f"{'Tokens per Step by Source':-^{BLOCK_WIDTH}}"
        for name, value in sources["tokens_per_step"].items():
            yield _line(f"{name}:", value)
        yield _line("Together:", sum(sources["tokens_per_step"].values()))
    else:
        yield f"{'Tokens per Step by Source':-^{BLOCK_WIDTH}}"
        yield "The server names no source." if api == "lorax" else "Measured with --api lorax only."
    yield f"{'Client':-^{BLOCK_WIDTH}}"
    yield _line("Client CPU (s):", ours["client_cpu_seconds"])
    yield _line("Client CPU (% of one core):", 100 * ours["client_cpu_share"])


def _line(label: str, value: Any) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


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
    ratios = b[a > 0] / a[a > 0]
    if not len(ratios):
        return None
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


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

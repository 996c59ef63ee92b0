"""The result of a load as one HTML file without links to other files or hosts, and as CSV."""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

import numpy as np

from lorikeet.launcher.bench.result import Result

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

"""The result of a load as one HTML file without links to other files or hosts, and as CSV."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

import numpy as np

from lorikeet.launcher.bench.plots import Axes, Plot, Points, bars, lines
from lorikeet.launcher.bench.result import Result

_MOST_POINTS = 400
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
    distributions = {name: shares(each) for name, each in by_tier.items()}
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
    picked = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MOST_POINTS)).astype(int))
    return [(float(ordered[index]), (int(index) + 1) / len(ordered)) for index in picked]


def _over_time(result: Result, good: Sequence[int]) -> Points:
    seconds: Counter[int] = Counter()
    for index in good:
        at = result["start_times"][index] + result["ttfts"][index]
        for gap in [0.0, *result["itls"][index]]:
            at += gap
            seconds[int(at)] += 1
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

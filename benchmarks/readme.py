"""The figures in README and demo/README, made from results/proof.json between markers: `python -m benchmarks.readme`.

Knows one kind of table and no measurement.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bars import BARS
from benchmarks.history import BEGIN, END, READMES, REPOSITORY
from benchmarks.proof import RESULTS, latest

FAMILY = "demo"
"""What the parts about the embedded family begin with, whose figures stand in the README of the folder of that name."""


def table(entries: Sequence[Mapping[str, Any]], *, family: bool) -> str:
    """One row per measured bar, in the order of the bars; misses are told as such."""
    newest = latest([dict(told) for told in entries])
    bars = [bar for bar in BARS if bar.part.startswith(FAMILY) is family]
    rows = [row(newest[bar.name]) for bar in bars if bar.name in newest]
    if not rows:
        return "Nothing has been measured yet: `make proof`.\n"
    head = "| what | measured | 95 % interval or range | wanted | |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def row(told: Mapping[str, Any]) -> str:
    sign = "≥" if told["at_least"] else "≤"
    wanted = "–" if told["wanted"] is None else f"{sign} {number(told['wanted'])}"
    low, high = told["spread"] or (None, None)
    spread = "–" if low == high else f"{number(low)} – {number(high)}"
    measured = "–" if told["measured"] is None else f"{number(told['measured'])} {told['unit']}".strip()
    if told["wanted"] is None and told["unit"]:
        # a figure without a bar: every case by name
        measured = ", ".join(f"{case['case']} {number(case['value'])}" for case in told["cases"]) + f" {told['unit']}"
    return f"| {told['bar']} | {measured} | {spread} | {wanted} | {told['verdict']} |"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.2g}" if abs(value) < 1e-3 else f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def generated(text: str, entries: Sequence[Mapping[str, Any]], *, family: bool) -> str:
    """`text` with the part between the markers made anew."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README needs one {BEGIN} and one {END}")
    block = f"{BEGIN}\n{table(entries, family=family)}{END}"
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: block, text, flags=re.DOTALL)


def shown(name: str, text: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """The text of one of READMES with the figures of its own."""
    return generated(text, entries, family=name.startswith(FAMILY))


if __name__ == "__main__":
    told = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for name in READMES:
        path = REPOSITORY / name
        path.write_text(shown(name, path.read_text(), told))

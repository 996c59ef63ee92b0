"""What a canary saw next to attacks at full size: a row of a table for each, and the bars that are not met."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence

from tests.attacks.canary import LATER_MB, Attacked, Canary, Memory
from tests.e2e.launched import ROOT, Launched

MAX_SLOWDOWN = 3.0
"""Maximum slowdown of the canary's p99, against as many harmless clients."""
HEAD = (
    *("scenario", "attacks", "requests", "failed", "p50 ms", "p99 ms", "harmless p99", "ratio", "longest load s"),
    "MB above idle: peak, limit, later",
)
_ROW = re.compile(r"^\| (router|shard|loader)[^|]*\| (\d+) MB", re.MULTILINE)
ROUTER_AND_LOADER_MB = 400.0
"""Of both together next to any of these attacks: the limits of their buffers are not all reached at once."""
LIMITS_MB = {name: float(mb) for name, mb in _ROW.findall((ROOT / "docs" / "limits.md").read_text())}
"""Memory of each process above idle."""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


class Report:
    """The table."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []

    def __str__(self) -> str:
        """In Markdown; empty without rows."""
        lines = [HEAD, ("---",) * len(HEAD), *self._rows] if self._rows else []
        return "\n".join(map(_line, lines))

    def add(
        self,
        scenario: str,
        num_attacks: int,
        canary: Canary,
        harmless: Canary | None = None,
        memory: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """`memory`: MB at the peak and later, by process."""
        p99 = canary.quantile_ms(99)
        other = "–" if harmless is None else f"{harmless.quantile_ms(99):.0f}"
        ratio = "–" if harmless is None else f"{p99 / harmless.quantile_ms(99):.2f}"
        counts = str(num_attacks), str(len(canary.seconds)), str(len(canary.failures))
        times = f"{canary.quantile_ms(50):.0f}", f"{p99:.0f}", other, ratio, f"{max(canary.loads, default=0.0):.1f}"
        parts = (
            f"{name} {peak:+.0f} of {LIMITS_MB[name]:.0f}, {later:+.0f}"
            for name, (peak, later) in (memory or {}).items()
        )
        self._rows.append((scenario, *counts, *times, "; ".join(parts) or "–"))
        print(_line(self._rows[-1]), file=sys.stderr)  # before the table, which a run that is ended does not print

    def measure(self, launched: Launched, name: str, attack: Callable[[], Attacked], harmless: Canary) -> str:
        """Add a row; returns the bars that are not met, "" for none."""
        memory = Memory(launched)
        seen = attack()
        memory.end()
        canary, later = seen.canary, memory.later()
        self.add(name, seen.num_attacks, canary, harmless, {key: (memory.peak[key], later[key]) for key in later})
        slowdown = canary.quantile_ms(99) / harmless.quantile_ms(99)
        both = memory.peak["router"] + memory.peak["loader"]
        bars = {
            f"{len(harmless.failures)} failed next to harmless clients": not harmless.failures,
            f"{len(canary.failures)} failed: {canary.failures[:3]}": not canary.failures,
            f"attackers got {seen.wrong[:3]}": not seen.wrong,
            f"p99 {slowdown:.2f} x": slowdown <= MAX_SLOWDOWN,
            **{f"{key} +{mb:.0f} MB": mb <= LIMITS_MB[key] for key, mb in memory.peak.items()},
            f"router and loader +{both:.0f} MB": both <= ROUTER_AND_LOADER_MB,
            **{f"{key} +{mb:.0f} MB later": mb <= LATER_MB for key, mb in later.items()},
        }
        return "; ".join(text for text, is_met in bars.items() if not is_met)

"""The sources of an answer's tokens, for people: a colour per source, and one line of statistics.

The colours are those of LLMSpeculativeSampling: accepted draft tokens red, tokens that replace a rejected one blue,
other tokens of the target magenta.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lorikeet.launcher.cli.client import Token
from lorikeet.proto.draft_sources import BY_VALUE

_RESET = "\x1b[0m"
COLOURS = {
    "prefill": "\x1b[32m",
    "target": "\x1b[35m",
    **{row.name: f"\x1b[{row.colours.terminal}m" for row in BY_VALUE.values()},
    "resample": "\x1b[34m",
    "bonus": "\x1b[95m",
}
"""By source: the prompt's last step, a step without draft tokens, accepted draft tokens by method, …"""
_STAGES = ("draft", "verify", "accept")


def painter(colours: bool) -> Callable[[Token], str]:
    """A function from a token to its text, in its source's colour with `colours`."""

    def paint(token: Token) -> str:
        colour = COLOURS.get(token.source or "")
        return f"{colour}{token.text}{_RESET}" if colours and colour else token.text

    return paint


def legend(colours: bool) -> str:
    """One line that names each colour."""
    return " ".join(f"{colour}{name}{_RESET}" if colours else name for name, colour in COLOURS.items())


def summary(details: Mapping[str, Any], seconds: float) -> str:
    """One line about an answer that took `seconds`: tokens, steps, accepted and drafted tokens, times."""
    num_tokens = details["generated_tokens"]
    parts = [f"{num_tokens} tokens in {seconds:.2f} s"]
    report = details.get("speculation")
    if report is None:
        return f"{parts[0]}, without speculation"
    steps = report["steps"]
    parts.append(f"{steps} steps ({num_tokens / max(steps, 1):.2f} tokens each)")
    share = f" ({report['accepted'] / report['drafted']:.0%})" if report["drafted"] else ""
    parts.append(f"accepted {report['accepted']}/{report['drafted']}{share}")
    parts.append(counts(report))
    spent = [f"{name} {report[key]:.3f} s" for name in _STAGES if (key := f"{name}_seconds") in report]
    return "; ".join([*parts, *([", ".join(spent)] if spent else [])])


def counts(report: Mapping[str, Any]) -> str:
    """Number of tokens per source."""
    return ", ".join(f"{name} {report['sources'][name]}" for name in COLOURS if report["sources"].get(name))

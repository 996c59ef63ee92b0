"""Counters of speculative decoding at `/metrics`, before and after a load: Lorikeet's, or vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorikeet.launcher.bench.connection import Connections
from lorikeet.launcher.cli.metrics_page import Page

_NAMES = {
    "num_drafts": ("lorikeet_speculation_steps_total", "vllm:spec_decode_num_drafts_total"),
    "draft_tokens": ("lorikeet_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "accepted_tokens": ("lorikeet_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}
_BY_POSITION = (
    "lorikeet_speculation_accepted_tokens_per_position_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)


@dataclass(frozen=True)
class Counts:
    """Speculation counters of a metrics page at one moment."""

    totals: Mapping[str, float]
    by_position: Mapping[int, float]
    """Accepted tokens by position in the step, from 0; without positions where none was."""

    @classmethod
    def read(cls, page: Page) -> "Counts":
        """Raises ValueError for a position that is no number."""
        totals = {key: page.total(_first(page, names)) for key, names in _NAMES.items()}
        by_position = page.by(_first(page, _BY_POSITION), "position")
        return cls(totals, {int(position): number for position, number in by_position.items()})


def _first(page: Page, names: tuple[str, ...]) -> str:
    """The one that the server has: the numbers of both would count twice."""
    return next((name for name in names if name in page.samples), names[0])


async def counts(connections: Connections) -> Counts | None:
    """The counters; None where the server does not show any."""
    try:
        response = await connections.get("/metrics")
    except (OSError, ValueError, TimeoutError):
        return None
    if response.status != 200:
        return None
    try:
        return Counts.read(Page.read(response.body.decode(), 0.0))
    except ValueError:
        return None


def rates(before: Counts | None, after: Counts | None) -> dict[str, Any]:
    """vLLM's keys; empty where nothing was drafted in between."""
    if before is None or after is None:
        return {}
    grown = {key: after.totals[key] - before.totals[key] for key in _NAMES}
    if grown["num_drafts"] <= 0 or grown["draft_tokens"] <= 0:
        return {}
    positions = range(max(after.by_position, default=-1) + 1)
    accepted = (after.by_position.get(at, 0.0) - before.by_position.get(at, 0.0) for at in positions)
    return {
        "spec_decode_acceptance_rate": 100 * grown["accepted_tokens"] / grown["draft_tokens"],
        "spec_decode_acceptance_length": 1 + grown["accepted_tokens"] / grown["num_drafts"],
        "spec_decode_num_drafts": round(grown["num_drafts"]),
        "spec_decode_draft_tokens": round(grown["draft_tokens"]),
        "spec_decode_accepted_tokens": round(grown["accepted_tokens"]),
        "spec_decode_per_position_acceptance_rates": [number / grown["num_drafts"] for number in accepted],
    }

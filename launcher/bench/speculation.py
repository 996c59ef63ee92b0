"""Counters of speculative decoding at `/metrics`, before and after a load: Lorikeet's, or vLLM's."""

from collections.abc import Mapping
from typing import Any

from lorikeet.launcher.bench.connection import Connections
from lorikeet.launcher.cli.metrics_page import Page

_NAMES = {
    "num_drafts": ("lorikeet_speculation_steps_total", "vllm:spec_decode_num_drafts_total"),
    "draft_tokens": ("lorikeet_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "accepted_tokens": ("lorikeet_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
}
Counts = Mapping[str, float]


async def counts(connections: Connections) -> Counts | None:
    """The counters; None where the server does not show any."""
    try:
        response = await connections.get("/metrics")
    except (OSError, ValueError, TimeoutError):
        return None
    if response.status != 200:
        return None
    try:
        page = Page.read(response.body.decode(), 0.0)
    except ValueError:
        return None
    known = {key: [name for name in names if name in page.samples] for key, names in _NAMES.items()}
    return {key: page.total(names[0]) if names else 0.0 for key, names in known.items()}


def rates(before: Counts | None, after: Counts | None) -> dict[str, Any]:
    """vLLM's keys; empty where nothing was drafted in between."""
    if before is None or after is None:
        return {}
    grown = {key: after[key] - before[key] for key in _NAMES}
    if grown["num_drafts"] <= 0 or grown["draft_tokens"] <= 0:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * grown["accepted_tokens"] / grown["draft_tokens"],
        "spec_decode_acceptance_length": 1 + grown["accepted_tokens"] / grown["num_drafts"],
        "spec_decode_num_drafts": round(grown["num_drafts"]),
        "spec_decode_draft_tokens": round(grown["draft_tokens"]),
        "spec_decode_accepted_tokens": round(grown["accepted_tokens"]),
    }

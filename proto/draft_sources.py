"""The sources of draft tokens, one row each. Router, launcher, shard, metrics, documentation and page derive their
lists from these rows; what proposes the tokens is a file in `shard/speculation/`.
"""

from dataclasses import dataclass
from enum import StrEnum

from lorikeet.proto import shard_pb2 as pb


class DraftPlace(StrEnum):
    """Where a source makes its draft tokens."""

    HOST = "host"
    """From texts, before the step."""
    DEVICE = "device"
    """By a network: its output is what the step reads."""
    GRAMMAR = "grammar"
    """From what the output must follow."""


class Cost(StrEnum):
    """What its draft tokens cost, apart from their verification."""

    NONE = "none"
    STEP = "step"
    """Steps that make them take longer, so that the times of such steps are kept apart."""
    PASSES = "passes"
    """One pass of a network of its own for each draft token of a request."""


@dataclass(frozen=True)
class Colours:
    """Colours of accepted tokens: fill and line of the page's light and dark theme, and ANSI code of a terminal."""

    fill: str
    line: str
    dark_fill: str
    dark_line: str
    terminal: int


@dataclass(frozen=True)
class SourceRow:
    """One source of draft tokens."""

    name: str
    """Of its accepted tokens in answers, and label `method` of its counters."""
    value: int
    """Of its accepted tokens on the wire."""
    label: str
    """Its name for people."""
    meaning: str
    """What the page says of an accepted token."""
    place: DraftPlace
    needs: str
    """What it needs from the request, from adapters, or from the server."""
    colours: Colours
    cost: Cost
    prior: float | None
    """Acceptance rate that is assumed before a draft was verified; None if drafts are accepted by construction."""
    by_heads: bool = False
    """Whether acceptance is learned for the content of the heads, in place of that of the request's adapter."""
    is_method: bool = False
    """Whether `speculative_method` has its name as a value: requests may ask for this source only."""


_DRAFTS: list[SourceRow] = [
    SourceRow(
        "lookup", pb.SOURCE_LOOKUP, "Prompt lookup", "proposed by prompt lookup, and accepted", DraftPlace.HOST,
        "the request's own text, or its `prediction`",
        Colours("#bfe3c6", "#1e7a34", "#1f4a2b", "#7fdc97", 33), Cost.NONE, 0.6, is_method=True,
    ),
    SourceRow(
        "medusa", pb.SOURCE_MEDUSA, "Medusa heads", "proposed by Medusa heads, and accepted", DraftPlace.DEVICE,
        "an adapter with heads, which read the hidden state of the newest token",
        Colours("#f3d3ee", "#9b2a89", "#532149", "#f19ae3", 36), Cost.STEP, 0.6, by_heads=True, is_method=True,
    ),
    SourceRow(
        "draft", pb.SOURCE_DRAFT, "Draft model", "proposed by the draft model, and accepted", DraftPlace.DEVICE,
        "`--draft-model-id`: a second network with KV of its own",
        Colours("#cfdcfb", "#2c4fc4", "#26366f", "#9fb6ff", 31), Cost.PASSES, 0.75, is_method=True,
    ),
    SourceRow(
        "grammar", pb.SOURCE_GRAMMAR, "Grammar", "the only token that the grammar allowed", DraftPlace.GRAMMAR,
        "a request with structured output",
        Colours("#fbe1ae", "#8a5a00", "#543c08", "#f2c066", 93), Cost.NONE, None,
    ),
    SourceRow(
        "history", pb.SOURCE_HISTORY, "History", "proposed from earlier outputs, and accepted", DraftPlace.HOST,
        "`speculative_history`, a tenant, and `--history-memory`",
        Colours("#c5e8ea", "#0f6d74", "#15474b", "#6fd7df", 96), Cost.NONE, 0.6,
    ),
]  # fmt: skip
"""In the order in which the wire counts drafts."""

SOURCE_NAMES: dict[int, str] = {
    pb.SOURCE_PREFILL: "prefill",
    pb.SOURCE_TARGET: "target",
    pb.SOURCE_RESAMPLE: "resample",
    pb.SOURCE_BONUS: "bonus",
}
"""Names of all sources of tokens, by their value on the wire."""
BY_VALUE: dict[int, SourceRow] = {}
"""The draft sources by their value on the wire, in the order in which the wire counts drafts."""


def register(row: SourceRow) -> None:
    """Add a draft source. Raises ValueError for a name or a value that is taken."""
    if row.value in SOURCE_NAMES or row.name in SOURCE_NAMES.values() or not 0 <= row.value < 256:
        raise ValueError(f"the draft source {row.name} needs a name and a value (0 to 255) of its own")
    SOURCE_NAMES[row.value] = row.name
    BY_VALUE[row.value] = row


def unregister(row: SourceRow) -> None:
    """Remove a draft source that was registered."""
    del SOURCE_NAMES[row.value], BY_VALUE[row.value]


for _row in _DRAFTS:
    register(_row)


def methods() -> tuple[str, ...]:
    """Values of `speculative_method`."""
    return ("auto", *(row.name for row in BY_VALUE.values() if row.is_method), "off")

"""Where the tokens of a request come from, and what proposes draft tokens. Imports no torch."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from lorikeet.proto import shard_pb2 as pb


class Source(IntEnum):
    """Where an emitted token came from."""

    PREFILL = pb.SOURCE_PREFILL
    TARGET = pb.SOURCE_TARGET
    LOOKUP = pb.SOURCE_LOOKUP
    MEDUSA = pb.SOURCE_MEDUSA
    DRAFT = pb.SOURCE_DRAFT
    RESAMPLE = pb.SOURCE_RESAMPLE
    BONUS = pb.SOURCE_BONUS
    GRAMMAR = pb.SOURCE_GRAMMAR
    HISTORY = pb.SOURCE_HISTORY


DraftKind = tuple[str, Source, bool]
"""The statistics group of a draft: its adapter, its source, and whether prompt lookup found a long match."""


class DraftSource(Protocol):
    """Indexes the tokens of one request and proposes the next ones."""

    source: Source
    """What its accepted tokens are reported as."""

    @property
    def match_length(self) -> int:
        """Tokens of the match that its next proposal continues."""
        ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens that have become known."""
        ...

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` draft tokens, possibly none. Changes nothing."""
        ...

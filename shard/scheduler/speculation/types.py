"""What a request may say about speculative decoding, and where its tokens come from. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
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


class Method(StrEnum):
    """What proposes draft tokens for a request; the values of the wire."""

    OFF = "off"
    AUTO = "auto"
    LOOKUP = "lookup"
    MEDUSA = "medusa"
    DRAFT = "draft"


class Schedule(StrEnum):
    """How the number of draft tokens in a step is chosen, up to the request's own bound; the values of the wire."""

    CONSTANT = "constant"
    HEURISTIC = "heuristic"
    AUTO = "auto"


class Verification(StrEnum):
    """How drafts are verified; the values of the wire."""

    SHARED_NOISE = "shared-noise"
    """The target samples at every position with the noise that the draft model used (Gumbel coupling); a draft token is
    accepted where both are equal.
    """
    REJECTION = "rejection"
    """Leviathan et al. 2023, Algorithm 1; Chen et al. 2023."""

    @classmethod
    def _missing_(cls, value: object) -> "Verification | None":
        return cls.SHARED_NOISE if value == DEPRECATED_SHARED_NOISE else None


DEPRECATED_SHARED_NOISE = "coupled"
"""The earlier spelling of shared-noise, accepted for one release."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding of one request."""

    method: Method = Method.OFF
    num_tokens: int = 0
    """Most draft tokens of prompt lookup and of a draft model in a step."""
    num_heads: int = 0
    """Most draft tokens of Medusa heads in a step."""
    schedule: Schedule = Schedule.CONSTANT
    verify: Verification = Verification.SHARED_NOISE
    prediction_ids: tuple[int, ...] = ()
    """A text that the output may repeat."""

    @property
    def takes_heads(self) -> bool:
        """Whether Medusa heads may propose drafts."""
        return self.num_heads > 0 and self.method in (Method.MEDUSA, Method.AUTO)


NO_SPECULATION = Speculation()


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

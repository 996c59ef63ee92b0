"""The outputs of a shard for single requests: messages, and the rows of `TokenColumns`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import BY_VALUE


@dataclass(slots=True)
class ColumnToken:
    """One request's token of `TokenColumns`, with what is read of a `RequestOutput`."""

    id: int
    token_ids: tuple[int]
    logprobs: Sequence[float]
    """One, or none."""
    alternative_ids: Sequence[int]
    alternative_logprobs: Sequence[float]
    sources: ClassVar[bytes] = bytes([pb.SOURCE_TARGET])
    step_ends: ClassVar[bytes] = b"\1"
    num_drafted: ClassVar[Sequence[int]] = ()
    num_accepted: ClassVar[int] = 0
    num_cached_tokens: ClassVar[int] = 0
    draft_seconds: ClassVar[float] = 0.0
    verify_seconds: ClassVar[float] = 0.0
    accept_seconds: ClassVar[float] = 0.0
    prefill_logprobs: ClassVar[Sequence[float]] = ()
    prefill_ranks: ClassVar[Sequence[int]] = ()
    prefill_alternative_ids: ClassVar[Sequence[int]] = ()
    prefill_alternative_logprobs: ClassVar[Sequence[float]] = ()
    pooled: ClassVar[bytes] = b""
    finish_reason: ClassVar[pb.FinishReason] = pb.FINISH_NONE
    error: ClassVar[str] = ""
    retryable: ClassVar[bool] = False
    in_step: ClassVar[bool] = False


ShardOutput = pb.RequestOutput | ColumnToken


def drafted_outputs(columns: pb.TokenColumns) -> Iterator[pb.RequestOutput]:
    """The outputs of requests whose step verified drafts: `columns.num_tokens` is set. Raises ValueError if the columns
    differ in length.
    """
    num_rows, num_tokens = len(columns.ids), len(columns.token_ids)
    k = len(columns.alternative_ids) // max(num_tokens, 1)
    lengths = [len(columns.num_tokens), len(columns.num_drafted), len(columns.num_accepted)]
    by_token = [sum(columns.num_tokens), len(columns.sources), len(columns.logprobs) or num_tokens]
    alternatives = [len(columns.alternative_ids), len(columns.alternative_logprobs)]
    is_valid = lengths == 3 * [num_rows] and by_token == 3 * [num_tokens] and alternatives == 2 * [k * num_tokens]
    if not is_valid or len(columns.seconds) != 3:
        raise ValueError("columns differ in length")
    place, first = list(BY_VALUE).index(pb.SOURCE_LOOKUP), 0
    rows = zip(columns.ids, columns.num_tokens, columns.num_drafted, columns.num_accepted, strict=True)
    for wire_id, count, num_drafted, num_accepted in rows:
        span = slice(first, first + count)
        of_alternatives = slice(k * first, k * (first + count))
        first += count
        output = pb.RequestOutput(
            id=wire_id,
            token_ids=columns.token_ids[span],
            sources=columns.sources[span],
            step_ends=bytes(count - 1) + b"\1",
            logprobs=columns.logprobs[span],
            alternative_ids=columns.alternative_ids[of_alternatives],
            alternative_logprobs=columns.alternative_logprobs[of_alternatives],
        )
        if num_drafted:
            output.num_drafted.extend(num_drafted * (index == place) for index in range(len(BY_VALUE)))
            output.num_accepted = num_accepted
            output.draft_seconds, output.verify_seconds, output.accept_seconds = columns.seconds
        yield output


class ColumnRows:
    """`TokenColumns` as Python values, one row per request."""

    def __init__(self, columns: pb.TokenColumns) -> None:
        """Raises ValueError if the columns differ in length."""
        self.has_drafts = bool(columns.num_tokens)
        """Whether a row may have several tokens, and says more than `__iter__` gives: `token` has all."""
        self._drafted = list(drafted_outputs(columns)) if self.has_drafts else []
        if self.has_drafts:
            columns = pb.TokenColumns(ids=columns.ids, token_ids=[part.token_ids[0] for part in self._drafted])
        self.ids, self._token_ids = list(columns.ids), list(columns.token_ids)
        self._logprobs = list(columns.logprobs)
        self._alternative_ids, self._alternative_logprobs = columns.alternative_ids, columns.alternative_logprobs
        num_rows = len(self.ids)
        k = self._num_alternatives = len(columns.alternative_ids) // max(num_rows, 1)
        lengths = len(self._token_ids), len(columns.alternative_ids), len(columns.alternative_logprobs)
        if lengths != (num_rows, k * num_rows, k * num_rows) or len(self._logprobs) not in (0, num_rows):
            raise ValueError("columns differ in length")

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        """Id, first token and log probability of each row, 0 without one."""
        return zip(self.ids, self._token_ids, self._logprobs or [0.0] * len(self.ids), strict=True)

    def token(self, index: int) -> ShardOutput:
        """One row."""
        if self.has_drafts:
            return self._drafted[index]
        k = self._num_alternatives
        span = slice(k * index, k * index + k)
        return ColumnToken(
            self.ids[index],
            (self._token_ids[index],),
            self._logprobs[index : index + 1],
            self._alternative_ids[span],
            self._alternative_logprobs[span],
        )

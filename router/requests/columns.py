"""The outputs of a shard for single requests: messages, and the rows of `TokenColumns`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lorikeet.proto import shard_pb2 as pb


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


class ColumnRows:
    """`TokenColumns` as Python values, one row per request."""

    def __init__(self, columns: pb.TokenColumns) -> None:
        """Raises ValueError if the columns differ in length."""
        self.ids, self._token_ids = list(columns.ids), list(columns.token_ids)
        self._logprobs = list(columns.logprobs)
        self._alternative_ids, self._alternative_logprobs = columns.alternative_ids, columns.alternative_logprobs
        num_rows = len(self.ids)
        k = self._num_alternatives = len(columns.alternative_ids) // max(num_rows, 1)
        lengths = len(self._token_ids), len(columns.alternative_ids), len(columns.alternative_logprobs)
        if lengths != (num_rows, k * num_rows, k * num_rows) or len(self._logprobs) not in (0, num_rows):
            raise ValueError("columns differ in length")

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        """Id, token and log probability of each row, 0 without one."""
        return zip(self.ids, self._token_ids, self._logprobs or [0.0] * len(self.ids), strict=True)

    def token(self, index: int) -> ColumnToken:
        """One row."""
        k = self._num_alternatives
        span = slice(k * index, k * index + k)
        return ColumnToken(
            self.ids[index],
            (self._token_ids[index],),
            self._logprobs[index : index + 1],
            self._alternative_ids[span],
            self._alternative_logprobs[span],
        )

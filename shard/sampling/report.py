"""The results of sampling: tokens, log probabilities and alternatives, on the device and then on the host.

Alternatives are ordered by score, then by token id; those that a request names are in its order.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
import structlog
import torch

from lorikeet.shard.batch.transfer import HostCopy, packed_size, unpack, unpacked
from lorikeet.shard.sampling.plan import Wanted

log = structlog.get_logger()

_BLOCK_ELEMENTS = 1 << 22
_ID_BITS = 32


@dataclass(frozen=True)
class HostSampled:
    """The tokens of one step as Python values, one entry per sampled row."""

    token_ids: list[int]
    logprobs: list[float]
    """NaN for rows that did not request them."""
    alternative_ids: list[list[int]]
    """As many per row as it requested, most likely first, or those that it named."""
    alternative_logprobs: list[list[float]]
    """-inf for a token that the row's filters exclude."""
    bad: list[bool]
    """Rows whose scores had a NaN or nothing finite; their token is undefined."""
    num_overflowed: int = 0
    """Rows that a device's kernels read again for every bit of a threshold: their filters keep too many tokens."""


@dataclass(frozen=True)
class SampledColumns:
    """The tokens of one step on the host, one row per sampled token."""

    num_alternatives: list[int]
    """[S] that each row requested."""
    # [S] int64
    token_ids: npt.NDArray[np.int64]
    # [S] bool
    bad: npt.NDArray[np.bool_]
    # [S] uint8
    overflowed: npt.NDArray[np.uint8]
    # [S] float32, NaN for rows that did not request them
    logprobs: npt.NDArray[np.float32]
    # [S, k_max]
    alternative_ids: npt.NDArray[np.int64]
    # [S, k_max] float32
    alternative_logprobs: npt.NDArray[np.float32]

    def to_lists(self) -> HostSampled:
        """The sampled tokens as Python values."""
        ids, values = (
            [row[:width] for row, width in zip(table.tolist(), self.num_alternatives, strict=True)]
            for table in (self.alternative_ids, self.alternative_logprobs)
        )
        lists = self.token_ids.tolist(), self.logprobs.tolist(), ids, values, self.bad.tolist()
        return HostSampled(*lists, int(self.overflowed.sum()))


class SlowRows:
    """Counts the rows of all steps that a device's kernels read again and again."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, num_rows: int) -> None:
        """Adds the rows of one step. Logs the count at each power of two."""
        before, self.count = self.count, self.count + num_rows
        if before.bit_length() < self.count.bit_length():
            log.info("sampling_slow_rows", count=self.count, effect="top_p or typical_p kept thousands of tokens")


@lru_cache(1024)
def _like(num_rows: int, k_max: int) -> tuple[torch.Tensor, ...]:
    """Tensors without values, in shape and type those of `Sampled`."""
    shapes = ((num_rows,), torch.long), ((num_rows,), torch.bool), ((num_rows,), torch.uint8)
    of_logprobs = ((num_rows,), torch.float32), ((num_rows, k_max), torch.long), ((num_rows, k_max), torch.float32)
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in (*shapes, *of_logprobs))


@lru_cache(1024)
def result_bytes(num_rows: int, k_max: int = 0) -> int:
    """Memory of `Sampled` for so many rows with as many alternatives."""
    return packed_size(_like(num_rows, k_max))


class Sampled:
    """The tokens of one step on the device: S rows, with room for `k_max` alternatives each."""

    def __init__(
        self,
        num_alternatives: list[int],
        device: torch.device,
        is_fused: bool = False,
        slow_rows: SlowRows | None = None,
        memory: torch.Tensor | None = None,
        num_places: int = 0,
    ) -> None:
        """num_alternatives: [S] that each row asked for. is_fused: whether one launch fills in all rows. memory:
        [bytes] uint8 of captured steps, with `num_places` ≥ S rows; by default of this step alone, with S.
        """
        self._slow_rows = slow_rows
        num_rows, k_max = max(len(num_alternatives), num_places), max(num_alternatives, default=0)
        self._num_alternatives = num_alternatives
        self._like = _like(num_rows, k_max)
        size = result_bytes(num_rows, k_max)
        # [bytes] all results, for one copy
        self._memory = torch.empty(size, dtype=torch.uint8, device=device) if memory is None else memory[:size]
        if not is_fused:
            self._memory.zero_()
            self.logprobs.fill_(float("nan"))
            self._alternative_logprobs.fill_(float("-inf"))
        self._copy = HostCopy()

    @cached_property
    def _views(self) -> list[torch.Tensor]:
        return list(unpack(self._memory, self._like))

    @property
    def token_ids(self) -> torch.Tensor:
        """[S] sampled token of each row."""
        return self._views[0]

    @property
    def bad(self) -> torch.Tensor:
        """[S] bool: scores had a NaN or nothing finite."""
        return self._views[1]

    @property
    def overflowed(self) -> torch.Tensor:
        """[S] uint8: 1 where kernels read the row again and again."""
        return self._views[2]

    @property
    def logprobs(self) -> torch.Tensor:
        """[S] float32, NaN where not asked for."""
        return self._views[3]

    @property
    def _alternative_ids(self) -> torch.Tensor:
        """[S, k_max] most likely or named tokens, as far as a row asked for."""
        return self._views[4]

    @property
    def _alternative_logprobs(self) -> torch.Tensor:
        """[S, k_max] float32."""
        return self._views[5]

    def report(self, wanted: Wanted, scores: torch.Tensor, token_ids: torch.Tensor) -> None:
        """scores: [S', V], of a distribution for a chunk of rows; token_ids: [S'], the tokens chosen there."""
        scores = scores.index_select(0, wanted.rows)
        token_ids = token_ids.index_select(0, wanted.rows)
        distribution = torch.log_softmax(scores, dim=-1)
        self.logprobs.index_copy_(0, wanted.batch_rows, distribution.gather(1, token_ids[:, None])[:, 0])
        k = wanted.num_alternatives
        if k:
            ids = most_likely(scores, k)
            if wanted.named is not None:
                rows, named = wanted.named
                ids[:, : named.shape[1]].index_copy_(0, rows, named)
            self._alternative_ids[:, :k].index_copy_(0, wanted.batch_rows, ids)
            self._alternative_logprobs[:, :k].index_copy_(0, wanted.batch_rows, distribution.gather(1, ids))

    def start_copy(self) -> Self:
        """Start to copy everything to the host."""
        self._copy = HostCopy(self._memory)
        return self

    def wait(self) -> SampledColumns:
        """The sampled tokens on the host. Waits for the sampling of this step and for nothing later."""
        num_rows = len(self._num_alternatives)
        memory = self._copy.wait()[0].numpy()
        columns = [column[:num_rows] for column in unpacked(memory, self._like)]
        if self._slow_rows is not None:
            self._slow_rows.add(int(np.count_nonzero(columns[2])))
        return SampledColumns(self._num_alternatives, *columns)

    def to_host(self) -> HostSampled:
        """The sampled tokens as Python values. Waits as `wait` does."""
        return self.wait().to_lists()


@dataclass(frozen=True)
class HostPromptLogprobs:
    """Log probabilities of prompt tokens as Python values, one entry per token."""

    logprobs: list[float]
    alternative_ids: list[list[int]]
    alternative_logprobs: list[list[float]]
    ranks: list[int]
    """1 for the most likely token."""


class PromptLogprobs:
    """Log probabilities of M prompt tokens, being copied from the device."""

    def __init__(self, logprobs: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, ranks: torch.Tensor) -> None:
        """logprobs: [M] float32; ids: [M, k] most likely tokens; values: [M, k] float32; ranks: [M]."""
        self._copy = HostCopy(logprobs, ids, values, ranks)

    def to_host(self) -> HostPromptLogprobs:
        return HostPromptLogprobs(*(tensor.tolist() for tensor in self._copy.wait()))


def prompt_logprobs(logits: torch.Tensor, target_ids: torch.Tensor, k: int) -> PromptLogprobs:
    """logits: [M, V] float32; target_ids: [M]. Of each target by its logits, and of the k most likely tokens there."""
    k = min(k, logits.shape[1])
    logprobs, ids, values, ranks = [], [], [], []
    num_rows = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for rows, targets in zip(logits.split(num_rows), target_ids.split(num_rows), strict=True):
        distribution = torch.log_softmax(rows, dim=-1)
        logprobs.append(distribution.gather(1, targets[:, None])[:, 0])
        ids.append(most_likely(rows, k) if k else targets.new_empty(len(rows), 0))
        values.append(distribution.gather(1, ids[-1]))
        ranks.append((rows > rows.gather(1, targets[:, None])).sum(dim=-1) + 1)
    return PromptLogprobs(*(torch.cat(parts) for parts in (logprobs, ids, values, ranks)))


def most_likely(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores: [S, V] float32. Returns [S, k] token ids by falling score, equal ones by rising id."""
    if scores.device.type != "cpu":
        return _by_score_and_id(scores, k)
    # a tenth of the time: what is selected is in no certain order, and of equal scores it may be any
    values, ids = scores.topk(k, dim=-1, sorted=False)
    table, selected, least = scores.numpy(), ids.numpy(), values.amin(dim=-1).numpy()
    for row, scores_there, lowest in zip(selected, table, least, strict=True):
        found = np.flatnonzero(scores_there >= lowest)
        if len(found) >= k:  # not in a row with NaN, which is reported as bad
            row[:] = found[np.argsort(-scores_there[found], kind="stable")[:k]]
    return ids


def _by_score_and_id(scores: torch.Tensor, k: int) -> torch.Tensor:
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(scores.shape[1], dtype=torch.long, device=scores.device)
    keys = (ordered.to(torch.long) << _ID_BITS) | (2**_ID_BITS - 1 - ids)
    return (2**_ID_BITS - 1) - (keys.topk(k, dim=-1).values & (2**_ID_BITS - 1))

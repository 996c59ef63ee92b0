"""What sampling gives back: tokens, log probabilities and alternatives, on the device and then on the host.

Knows laws as rows of scores; nothing of how a token was chosen. Alternatives are ordered by score, then by token id.
"""

from dataclasses import dataclass, field

import torch

from lorikeet.shard.batch.transfer import HostCopy
from lorikeet.shard.sampling.plan import Wanted

_BLOCK_ELEMENTS = 1 << 22
_ID_BITS = 32


@dataclass(frozen=True)
class HostSampled:
    """The tokens of one step as Python values, one entry per sampled row."""

    token_ids: list[int]
    logprobs: list[float]
    """NaN for rows that did not ask."""
    alternative_ids: list[list[int]]
    """As many per row as it asked for, most likely first."""
    alternative_logprobs: list[list[float]]
    """-inf for a token that the row's filters exclude."""
    bad: list[bool]
    """Rows whose scores had a NaN or nothing finite; their token means nothing."""


@dataclass(frozen=True)
class Sampled:
    """The tokens of one step on the device."""

    # [S] sampled token of each row
    token_ids: torch.Tensor
    # [S] float32, NaN where not asked for
    logprobs: torch.Tensor
    # [S, k_max] most likely tokens, meaningful as far as a row asked for
    alternative_ids: torch.Tensor
    # [S, k_max] float32
    alternative_logprobs: torch.Tensor
    # [S] bool: scores had a NaN or nothing finite
    bad: torch.Tensor
    num_alternatives: list[int]
    """Alternatives that each row asked for."""
    _copy: HostCopy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        copy = HostCopy(self.token_ids, self.logprobs, self.alternative_ids, self.alternative_logprobs, self.bad)
        object.__setattr__(self, "_copy", copy)

    def to_host(self) -> HostSampled:
        """The same as Python values. Waits for this step's sampling and nothing later."""
        token_ids, logprobs, ids, values, bad = (tensor.tolist() for tensor in self._copy.wait())
        widths = self.num_alternatives
        return HostSampled(
            token_ids=token_ids,
            logprobs=logprobs,
            alternative_ids=[row[:width] for row, width in zip(ids, widths, strict=True)],
            alternative_logprobs=[row[:width] for row, width in zip(values, widths, strict=True)],
            bad=bad,
        )


class Outcome:
    """A step's results while they are being found: S rows, room for `k_max` alternatives each."""

    def __init__(self, num_rows: int, num_alternatives: list[int], device: torch.device) -> None:
        k_max = max(num_alternatives, default=0)
        self._num_alternatives = num_alternatives
        # [S]
        self.token_ids = torch.zeros(num_rows, dtype=torch.long, device=device)
        # [S] bool
        self.bad = torch.zeros(num_rows, dtype=torch.bool, device=device)
        # [S] float32
        self._logprobs = torch.full((num_rows,), float("nan"), device=device)
        # [S, k_max]
        self._alternative_ids = torch.zeros(num_rows, k_max, dtype=torch.long, device=device)
        # [S, k_max] float32
        self._alternative_logprobs = torch.full((num_rows, k_max), float("-inf"), device=device)

    def report(self, wanted: Wanted, scores: torch.Tensor, token_ids: torch.Tensor) -> None:
        """scores: [S', V], the law's scores for a chunk of rows; token_ids: [S'], the tokens chosen there."""
        scores = scores.index_select(0, wanted.rows)
        token_ids = token_ids.index_select(0, wanted.rows)
        distribution = torch.log_softmax(scores, dim=-1)
        self._logprobs.index_copy_(0, wanted.batch_rows, distribution.gather(1, token_ids[:, None])[:, 0])
        k = wanted.num_alternatives
        if k:
            ids = most_likely(scores, k)
            self._alternative_ids[:, :k].index_copy_(0, wanted.batch_rows, ids)
            self._alternative_logprobs[:, :k].index_copy_(0, wanted.batch_rows, distribution.gather(1, ids))

    def sampled(self) -> Sampled:
        return Sampled(
            self.token_ids,
            self._logprobs,
            self._alternative_ids,
            self._alternative_logprobs,
            self.bad,
            self._num_alternatives,
        )


@dataclass(frozen=True)
class HostPromptLogprobs:
    """Log probabilities of prompt tokens as Python values, one entry per token."""

    logprobs: list[float]
    alternative_ids: list[list[int]]
    alternative_logprobs: list[list[float]]


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of prompt tokens on the device."""

    # [M] float32, one per target
    logprobs: torch.Tensor
    # [M, k] most likely tokens
    alternative_ids: torch.Tensor
    # [M, k] float32
    alternative_logprobs: torch.Tensor
    _copy: HostCopy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_copy", HostCopy(self.logprobs, self.alternative_ids, self.alternative_logprobs))

    def to_host(self) -> HostPromptLogprobs:
        logprobs, ids, values = (tensor.tolist() for tensor in self._copy.wait())
        return HostPromptLogprobs(logprobs, ids, values)


def prompt_logprobs(logits: torch.Tensor, target_ids: torch.Tensor, k: int) -> PromptLogprobs:
    """logits: [M, V] float32; target_ids: [M]. The model's own law at each target, and its k most likely tokens."""
    k = min(k, logits.shape[1])
    logprobs, ids, values = [], [], []
    num_rows = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for rows, targets in zip(logits.split(num_rows), target_ids.split(num_rows), strict=True):
        distribution = torch.log_softmax(rows, dim=-1)
        logprobs.append(distribution.gather(1, targets[:, None])[:, 0])
        ids.append(most_likely(rows, k) if k else targets.new_empty(len(rows), 0))
        values.append(distribution.gather(1, ids[-1]))
    return PromptLogprobs(torch.cat(logprobs), torch.cat(ids), torch.cat(values))


def most_likely(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores: [S, V] float32. Returns [S, k] token ids by falling score."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(scores.shape[1], dtype=torch.long, device=scores.device)
    keys = (ordered.to(torch.long) << _ID_BITS) | (2**_ID_BITS - 1 - ids)
    return (2**_ID_BITS - 1) - (keys.topk(k, dim=-1).values & (2**_ID_BITS - 1))

"""What sampling keeps on the device for the rows of running requests, and how the tokens of a chunk of rows are chosen.

Never reads from the device, so a step may be sampled before the one before it is known to the host.
"""

from collections.abc import Callable

import torch

from lorikeet.shard.sampling import filters
from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.masks import History
from lorikeet.shard.sampling.noise import Purpose, log_exponentials, row_keys, token_words
from lorikeet.shard.sampling.penalties import TokenCounts, Watermark
from lorikeet.shard.sampling.plan import Chunk, Filter, Planner, Row
from lorikeet.shard.speculation.device.device_drafts import num_device_tokens


class RowState:
    """The newest tokens of each row, the counts of penalties, and the parameters of the requests."""

    def __init__(
        self, vocab_size: int, max_rows: int, device: torch.device, gamma: float, delta: float, fuses: bool
    ) -> None:
        """`gamma` and `delta` are those of the watermark; `fuses`: whether kernels of the device sample rows."""
        self.vocab_size = vocab_size
        # [N] int64 newest token of each row, then drafts, in one tensor for captured steps
        self.device_tokens = torch.zeros(num_device_tokens(max_rows), dtype=torch.long, device=device)
        # [max_rows] newest token of each row, also when the host does not know it yet
        self.last_tokens = self.device_tokens[:max_rows]
        # [V] int64 by token id
        self.words = token_words(vocab_size, device)
        self.counts = TokenCounts(vocab_size, device)
        self.history = History(max_rows, device)
        self.planner = Planner(vocab_size, device, fuses)
        self.rows: dict[int, Row] = {}
        self._watermark = Watermark(self.words, gamma, delta)

    def distribution(self, chunk: Chunk, scores: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """scores: [S', V], perhaps changed in place; positions: [S], needed for masks. Returns [S', V]: the scores that
        tokens are chosen by.
        """
        if chunk.masks is not None and positions is not None:
            chunk.masks.apply(scores, positions[chunk.batch_rows], self.history)
        if chunk.bias is not None:
            chunk.bias.apply(scores)
        if chunk.watermarked is not None:
            at, rows = chunk.watermarked
            self._watermark.apply(scores, at, self.last_tokens.index_select(0, rows))
        if chunk.penalties is not None:
            chunk.penalties.apply(scores, self.counts)
        return _filter(chunk, scores.div_(chunk.temperature)) if chunk.do_sample else scores

    def choose(
        self, chunk: Chunk, scores: torch.Tensor, positions: torch.Tensor | None, purpose: Purpose = Purpose.DRAW
    ) -> torch.Tensor:
        """scores: [S', V]; positions: [S], needed where tokens are sampled. Returns [S'] tokens: sampled, or the
        highest.
        """
        if not chunk.do_sample or positions is None:
            return arg_max(scores)
        keys = row_keys(chunk.seeds, positions.index_select(0, chunk.batch_rows), purpose)
        return arg_max(scores - log_exponentials(self.words, keys))


def _filter(chunk: Chunk, scores: torch.Tensor) -> torch.Tensor:
    """scores: [S', V] after temperature, perhaps changed in place."""
    first_check = filters.FIRST_CHECK
    if chunk.top_k is not None and chunk.top_k.rows is None:
        first_check = min(chunk.top_k.largest, first_check)
    steps: list[tuple[Filter | None, Callable[[torch.Tensor, Filter], torch.Tensor]]] = [
        (chunk.top_k, lambda part, used: filters.top_k(part, used.values, used.largest)),
        (chunk.top_p, lambda part, used: filters.top_p(part, used.values, first_check)),
        (chunk.min_p, lambda part, used: filters.min_p(part, used.values)),
        (chunk.typical_p, lambda part, used: filters.typical_p(part, used.values, first_check)),
    ]
    for used, apply in steps:
        if used is not None:
            if used.rows is None:
                scores = apply(scores, used)
            else:
                scores.index_copy_(0, used.rows, apply(scores.index_select(0, used.rows), used))
    return scores

"""The draft model's part of a step: it takes in the tokens it lacks of each request, then draws drafts, one forward
pass per depth for all requests together. Its KV is in pages with the same numbers as the target's.

Chen et al. 2023, Leviathan et al. 2023; HF transformers calls it the assistant.
"""

from collections.abc import Sequence

import numpy as np
import torch

from lorikeet.proto.params import FIRST_VIRTUAL_ID, Method, Speculation
from lorikeet.shard.batch.inputs import Network
from lorikeet.shard.batch.segments import Segment, Segments
from lorikeet.shard.requests.request import ScheduledRequest
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.drafting import DraftDraws
from lorikeet.shard.speculation.draft_model import Passes
from lorikeet.shard.speculation.states import Indices
from lorikeet.shard.system.timing import IdleTime, Phase, PhaseTimer


class DraftNetwork:
    """A draft model next to the target."""

    warm_up = Speculation(Method.DRAFT, 2)
    """What a request asks for to run the draft model."""

    def __init__(self, network: Network, sampler: Sampler, vocab_size: int, own_vocab_size: int) -> None:
        """Rows of the target's output head and of the draft model's: one vocabulary, perhaps padded to two sizes."""
        self._network = network
        self._sampler = sampler
        self._vocab_size, self._own_vocab_size = vocab_size, own_vocab_size

    def draft(
        self, scheduled: Sequence[ScheduledRequest], of_decoding: Passes | None, timer: PhaseTimer, idle: IdleTime
    ) -> tuple[DraftDraws | None, dict[int, list[int]]]:
        """Compute what is planned for the draft model. of_decoding: its part for requests that only decode. Returns how
        the drafts were drawn, None without any, and those of each row. Marks the end of the first pass, and stops
        `idle` before it.
        """
        scheduled = [item for item in scheduled if item.draft_end > item.draft_start]
        passes = _passes_of(scheduled, self._network.inputs.page_size).then(of_decoding)
        if not passes.texts:
            return None, {}
        idle.stop()
        # Those with the most drafts first, so that the requests of each depth are the first of the depth before.
        passes = passes.in_order(np.argsort(-passes.num_drawn, kind="stable"))
        # by depth: requests that draw a token there
        counts = [int(np.count_nonzero(passes.num_drawn > depth)) for depth in range(int(passes.num_drawn[0]))]
        logits = self._take_in(passes, counts[0] if counts else 0)
        if not counts:
            return None, {}
        draws = self._sampler.begin_drafts()
        token_ids = self._draw(draws, logits, passes, depth=0)
        timer.mark(Phase.FIRST_DRAFT)
        for depth, count in enumerate(counts[1:], 1):
            logits = self._extend(passes, depth, token_ids[:count])
            token_ids = self._draw(draws, logits, passes, depth)
        draws.restore()
        return draws, draws.to_host()

    def _take_in(self, passes: Passes, num_drawing: int) -> torch.Tensor:
        """The first pass. Returns [num_drawing, V]: logits after the last token of the first `num_drawing` requests."""
        spans = zip(passes.texts, passes.starts.tolist(), passes.ends.tolist(), strict=True)
        input_ids = np.array([token for text, start, end in spans for token in text[start:end]], np.int64)
        # virtual tokens are the adapter's: any other id in their place only makes drafts worse
        input_ids[input_ids >= FIRST_VIRTUAL_ID] = 0
        counts = passes.ends - passes.starts
        last_rows = np.cumsum(counts) - 1
        segments = _segments(passes, passes.starts, counts)
        return self._forward(segments, torch.from_numpy(input_ids), torch.from_numpy(last_rows[:num_drawing]))

    def _draw(self, draws: DraftDraws, logits: torch.Tensor, passes: Passes, depth: int) -> torch.Tensor:
        """logits: [n, V], of the first requests. Returns [n]: the next draft token of each."""
        count, missing = logits.shape[0], self._vocab_size - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        positions = (passes.ends[:count] + depth).tolist()
        return draws.draw(logits[:, : self._vocab_size], passes.rows[:count].tolist(), positions)

    def _extend(self, passes: Passes, depth: int, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [n] draft tokens of the depth before, of the first requests. Returns [n, V]."""
        count = len(token_ids)
        segments = _segments(passes, passes.ends[:count] + depth - 1, np.ones(count, np.int64))
        return self._forward(segments, token_ids, torch.arange(count))

    def _forward(self, segments: Segments, input_ids: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] on the host or the device; logits_rows: [S] on the host. Returns [S, V]."""
        if self._own_vocab_size < self._vocab_size:
            input_ids = input_ids.clamp(max=self._own_vocab_size - 1)  # ids in the padding of the target's head
        self._network.inputs.fill(segments, input_ids, logits_rows)
        return self._network.forward()


def _passes_of(scheduled: Sequence[ScheduledRequest], page_size: int) -> Passes:
    """Of requests that do not only decode."""
    numbers = [(item.draft_start, item.draft_end, item.request.row, item.num_drawn) for item in scheduled]
    starts, ends, rows, num_drawn = np.array(numbers, np.int64).reshape(-1, 4).T
    segments = [
        Segment(item.draft_start, item.draft_end - item.draft_start + item.num_drawn, item.request.page_ids)
        for item in scheduled
    ]
    page_table, texts = Segments.of(segments, page_size).page_table, [item.request.token_ids for item in scheduled]
    return Passes(texts, page_table, starts, ends, rows, num_drawn)


def _segments(passes: Passes, starts: Indices, counts: Indices) -> Segments:
    """Of the first requests, [n] each. The draft model has no adapters."""
    n, zeros = len(starts), np.zeros(len(starts), np.int32)
    table, rows = passes.page_table[:n], passes.rows[:n]
    return Segments.decoding(starts.astype(np.int32), zeros - 1, zeros, table, counts, zeros, rows)

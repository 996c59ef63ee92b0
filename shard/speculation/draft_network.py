"""The draft model's part of a step: it takes in the tokens it lacks of each request, then draws drafts, one forward
pass per depth for all requests together. Its KV is in pages with the same numbers as the target's.

Chen et al. 2023, Leviathan et al. 2023; HF transformers calls it the assistant.
"""

from collections.abc import Sequence

import torch

from lorikeet.proto.params import FIRST_VIRTUAL_ID, Method, Speculation
from lorikeet.shard.batch.inputs import Network
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.requests.request import ScheduledRequest
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.drafting import DraftDraws
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

    def draft(self, scheduled: Sequence[ScheduledRequest], timer: PhaseTimer, idle: IdleTime) -> DraftDraws | None:
        """Compute what is planned for the draft model, and fill in the drafts that it draws. Returns how they were
        drawn, None without any. Marks the end of the first pass, and stops `idle` before it.
        """
        scheduled = [item for item in scheduled if item.draft_end > item.draft_start]
        if not scheduled:
            return None
        idle.stop()
        # Those with the most drafts first, so that the requests of each depth are the first of the depth before.
        scheduled.sort(key=lambda item: item.num_drawn, reverse=True)
        drawing = [item for item in scheduled if item.num_drawn]
        logits = self._take_in(scheduled, len(drawing))
        if not drawing:
            return None
        draws = self._sampler.begin_drafts()
        token_ids = self._draw(draws, logits, drawing, depth=0)
        timer.mark(Phase.FIRST_DRAFT)
        for depth in range(1, drawing[0].num_drawn):
            members = [item for item in drawing if item.num_drawn > depth]
            logits = self._extend(members, depth, token_ids[: len(members)])
            token_ids = self._draw(draws, logits, members, depth)
        draws.restore()
        found = draws.to_host()
        for item in drawing:
            item.draft_ids = found[item.request.row]
        return draws

    def _take_in(self, scheduled: Sequence[ScheduledRequest], num_drawing: int) -> torch.Tensor:
        """The first pass. Returns [num_drawing, V]: logits after the last token of the first `num_drawing` requests."""
        input_ids: list[int] = []
        rows: list[int] = []
        for item in scheduled:
            token_ids = item.request.token_ids[item.draft_start : item.draft_end]
            # virtual tokens are the adapter's: any other id in their place only makes drafts worse
            input_ids += [token if token < FIRST_VIRTUAL_ID else 0 for token in token_ids]
            rows.append(len(input_ids) - 1)
        segments = [_segment(item, item.draft_start, item.draft_end) for item in scheduled]
        return self._forward(segments, torch.tensor(input_ids), torch.tensor(rows[:num_drawing], dtype=torch.long))

    def _draw(
        self, draws: DraftDraws, logits: torch.Tensor, scheduled: Sequence[ScheduledRequest], depth: int
    ) -> torch.Tensor:
        """logits: [n, V]. Returns [n]: the next draft token of each request."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        rows, positions = [item.request.row for item in scheduled], [item.end + depth for item in scheduled]
        return draws.draw(logits[:, : self._vocab_size], rows, positions)

    def _extend(self, scheduled: Sequence[ScheduledRequest], depth: int, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [n] draft tokens of the depth before. Returns [n, V]."""
        segments = [_segment(item, item.draft_end + depth - 1, item.draft_end + depth) for item in scheduled]
        return self._forward(segments, token_ids, torch.arange(len(scheduled)))

    def _forward(self, segments: list[Segment], input_ids: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """input_ids: [T] on the host or the device; logits_rows: [S] on the host. Returns [S, V]."""
        if self._own_vocab_size < self._vocab_size:
            input_ids = input_ids.clamp(max=self._own_vocab_size - 1)  # ids in the padding of the target's head
        self._network.inputs.fill(segments, input_ids, logits_rows)
        return self._network.forward()


def _segment(item: ScheduledRequest, start: int, end: int) -> Segment:
    return Segment(start, end - start, item.request.page_ids)

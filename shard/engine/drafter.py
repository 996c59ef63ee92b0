"""The draft model's part of a step: it takes in what it lacks of each request, then draws drafts, one forward pass per
depth for all requests together. Its KV lies in pages of the same numbers as the target's.

Chen et al. 2023, Leviathan et al. 2023; HF transformers calls it the assistant.
"""

from collections.abc import Sequence

import torch

from lorikeet.shard.batch.inputs import Segment, StepInputs
from lorikeet.shard.batch.network import Network
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.engine.stopwatch import Phase, Stopwatch
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.drafting import DraftDraws
from lorikeet.shard.scheduler.request import Source
from lorikeet.shard.scheduler.scheduled_request import ScheduledRequest


class Drafter:
    """A draft model beside the target."""

    def __init__(self, network: Network, sampler: Sampler, vocab_size: int, own_vocab_size: int) -> None:
        """Rows of the target's output head and of the draft model's: one vocabulary, perhaps padded to two sizes."""
        self._network = network
        self._sampler = sampler
        self._vocab_size, self._own_vocab_size = vocab_size, own_vocab_size

    def draft(self, shares: Sequence[ScheduledRequest], watch: Stopwatch | None) -> DraftDraws | None:
        """Compute what the shares plan for the draft model, and put its drafts into those that it guesses for. Returns
        how they were drawn; None without drafts. Marks the end of the first pass.
        """
        shares = [share for share in shares if share.draft_end > share.draft_start]
        if not shares:
            return None
        # Those with the most drafts first, so that each depth is the beginning of the one before.
        shares.sort(key=_width, reverse=True)
        drawing = [share for share in shares if _width(share)]
        logits = self._take_in(shares, len(drawing))
        if not drawing:
            return None
        draws = self._sampler.begin_drafts()
        token_ids = self._draw(draws, logits, drawing, depth=0)
        if watch is not None:
            watch.mark(Phase.FIRST_DRAFT)
        for depth in range(1, _width(drawing[0])):
            members = [share for share in drawing if _width(share) > depth]
            logits = self._go_on(members, depth, token_ids[: len(members)])
            token_ids = self._draw(draws, logits, members, depth)
        draws.forget()
        found = draws.to_host()
        for share in drawing:
            share.draft_ids = found[share.request.row]
        return draws

    def _take_in(self, shares: Sequence[ScheduledRequest], num_drawing: int) -> torch.Tensor:
        """The first pass. Returns [num_drawing, V]: logits after the last token of the first so many shares."""
        input_ids: list[int] = []
        rows: list[int] = []
        for share in shares:
            input_ids += share.request.token_ids[share.draft_start : share.draft_end]
            rows.append(len(input_ids) - 1)
        segments = [_segment(share, share.draft_start, share.draft_end) for share in shares]
        inputs = self._network.inputs
        return self._forward(segments, _tensor(input_ids, inputs), _tensor(rows[:num_drawing], inputs))

    def _draw(
        self, draws: DraftDraws, logits: torch.Tensor, shares: Sequence[ScheduledRequest], depth: int
    ) -> torch.Tensor:
        """logits: [n, V]. Returns [n]: the next draft of each share."""
        rows, places = [share.request.row for share in shares], [share.end + depth for share in shares]
        return draws.draw(self._fit(logits), rows, places)

    def _go_on(self, shares: Sequence[ScheduledRequest], depth: int, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [n] drafts of the depth before. Returns [n, V]."""
        segments = [_segment(share, share.draft_end + depth - 1, share.draft_end + depth) for share in shares]
        return self._forward(segments, token_ids, torch.arange(len(shares), device=token_ids.device))

    def _forward(self, segments: list[Segment], input_ids: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """input_ids: [T]; logits_rows: [S]. Returns [S, V]."""
        if self._own_vocab_size < self._vocab_size:
            input_ids = input_ids.clamp(max=self._own_vocab_size - 1)  # where a target says what is no token at all
        self._network.inputs.fill(segments, input_ids, logits_rows)
        return self._network.forward()

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [n, the draft model's V]. Returns [n, the target's V]."""
        missing = self._vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self._vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def _width(share: ScheduledRequest) -> int:
    return len(share.draft_ids) if share.source is Source.DRAFT else 0


def _segment(share: ScheduledRequest, start: int, end: int) -> Segment:
    return Segment(start, end - start, share.request.page_ids)


def _tensor(values: Sequence[int], inputs: StepInputs) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.long), inputs.device)

"""The tokens of one step as the model sees them: one flat row of T tokens, cut into segments, one per request.

`StepInputs` is one object for the life of the model: every layer of ours and the attention function hold it, and it is
refilled before each forward. Knows nothing of requests, sampling or scheduling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segment:
    """One request's share of a step: tokens at positions `start` … `start + num_tokens - 1`."""

    start: int
    num_tokens: int
    page_ids: Sequence[int]
    """KV pages in the order of positions; cover at least `start + num_tokens` tokens."""

    @property
    def kv_len(self) -> int:
        """Tokens visible to the segment's last token."""
        return self.start + self.num_tokens


class StepInputs:
    """What a forward pass reads besides weights and KV."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.segments: list[Segment] = []
        # [T] token ids
        self.input_ids = torch.empty(0, dtype=torch.long, device=device)
        # [T] absolute position of each token in its request
        self.position_ids = torch.empty(0, dtype=torch.long, device=device)
        # [T] where each token's K and V go: page id * P + offset in page
        self.kv_slots = torch.empty(0, dtype=torch.long, device=device)
        # [S] indices into T whose logits are wanted
        self.logits_rows = torch.empty(0, dtype=torch.long, device=device)

    def fill(self, segments: Sequence[Segment], input_ids: torch.Tensor, logits_rows: torch.Tensor) -> None:
        """Describe the next step. input_ids: [T] on the device; logits_rows: [S] indices into T on the device."""
        self.segments = list(segments)
        positions: list[int] = []
        slots: list[int] = []
        for segment in segments:
            span = range(segment.start, segment.kv_len)
            positions.extend(span)
            slots.extend(
                segment.page_ids[position // self.page_size] * self.page_size + position % self.page_size
                for position in span
            )
        self.input_ids = input_ids
        self.position_ids = torch.tensor(positions, dtype=torch.long, device=self.device)
        self.kv_slots = torch.tensor(slots, dtype=torch.long, device=self.device)
        self.logits_rows = logits_rows

"""The tokens of one step as the model sees them: one flat row of T tokens, cut into segments, one per request.

`StepInputs` is one object for the life of the model: every layer of ours and the attention function hold it, and it is
refilled before each forward. Knows nothing of requests, sampling or scheduling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
        # Host side, for attention backends. [R] first position, number of tokens, first row in T of each segment
        self.starts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.counts: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.first_rows: npt.NDArray[np.int32] = np.empty(0, np.int32)
        # [R, most pages of a segment] page ids, 0 where a segment has fewer
        self.page_table: npt.NDArray[np.int32] = np.empty((0, 1), np.int32)
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
        num_segments = len(segments)
        self.segments = list(segments)
        self.starts = np.fromiter((segment.start for segment in segments), np.int32, num_segments)
        self.counts = np.fromiter((segment.num_tokens for segment in segments), np.int32, num_segments)
        self.first_rows = (np.cumsum(self.counts) - self.counts).astype(np.int32)
        num_pages = -(-(self.starts + self.counts) // self.page_size)
        self.page_table = np.zeros((num_segments, int(num_pages.max(initial=1))), np.int32)
        for row, segment, count in zip(self.page_table, segments, num_pages.tolist(), strict=True):
            row[:count] = segment.page_ids[:count]
        # [T] segment and position of each token
        owners = np.repeat(np.arange(num_segments), self.counts)
        positions = np.arange(owners.size) + (self.starts - self.first_rows).astype(np.int64)[owners]
        slots = self.page_table[owners, positions // self.page_size].astype(np.int64) * self.page_size
        slots += positions % self.page_size
        self.input_ids = input_ids
        self.position_ids = torch.from_numpy(positions).to(self.device, non_blocking=True)
        self.kv_slots = torch.from_numpy(slots).to(self.device, non_blocking=True)
        self.logits_rows = logits_rows

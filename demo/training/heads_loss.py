"""The loss of Medusa heads that are trained together with an adapter: head h learns the token h + 1 after the next."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lorikeet.adapters.formats import heads as heads_format
from lorikeet.adapters.formats.heads import HeadsFile, MedusaHeads, MedusaShape
from lorikeet.demo.data.packing import NO_LABEL, Batch


class HeadsLoss(nn.Module):
    """Mean cross entropy over the answers, summed over the heads, with lower weights for later heads."""

    def __init__(self, num_heads: int, hidden_size: int, share: float, fading: float = 0.8) -> None:
        super().__init__()
        self.heads = MedusaHeads(MedusaShape(num_heads, 1, hidden_size))
        self._weights = [share * fading**head for head in range(num_heads)]

    def forward(self, hidden: Tensor, batch: Batch, output_head: Callable[[Tensor], Tensor]) -> Tensor:
        """`hidden` [B, L, H] → scalar."""
        answers = batch.labels != NO_LABEL
        ahead = self.heads(hidden[answers])
        total = hidden.new_zeros(())
        for head, weight in enumerate(self._weights):
            labels = batch.ahead(head + 1)[answers]
            logits = output_head(ahead[labels != NO_LABEL, head])
            total = total + weight * cross_entropy(logits.float(), labels[labels != NO_LABEL])
        return total

    def save(self, folder: Path, base_name: str) -> None:
        """In bf16, as `lorikeet-heads` writes them."""
        heads_format.write(folder, HeadsFile(self.heads.shape, self.heads.tensors(torch.bfloat16), base_name))

"""Medusa heads in plain torch: from hidden states to draft tokens. The reference for faster implementations.

A hidden row is the input of the base model's output head, after the final norm. The row that gives the token at
position t + 1 gives head h's draft token for position t + 2 + h.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from lorikeet.adapters.medusa.format import HeadsFile, HeadsShape

OutputHead = Callable[[Tensor], Tensor]
"""From hidden rows [S, H] to the base model's logits [S, V]."""


class MedusaHeads(nn.Module):
    """All heads of one set. Untrained heads propose the base model's own prediction: their blocks add nothing."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.hidden_size
        self.weights = nn.ParameterList(torch.zeros(shape.num_heads, size, size) for _ in range(shape.num_layers))
        """Per block [heads, H out, H in]."""
        self.biases = nn.ParameterList(torch.zeros(shape.num_heads, size) for _ in range(shape.num_layers))
        """Per block [heads, H]."""
        vocab_size = shape.vocab_size
        self.matrices = None if vocab_size is None else nn.Parameter(torch.zeros(shape.num_heads, vocab_size, size))
        """[heads, V, H], version 1 only."""

    @classmethod
    def of(cls, file: HeadsFile) -> "MedusaHeads":
        """The heads of a file, in float32 regardless of the file's dtype."""
        heads = cls(file.shape)
        heads.load(file.tensors)
        return heads

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values of a file's tensors, by name."""
        for name, tensor in self._named():
            tensor.copy_(tensors[name])

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of a file of these heads, by name."""
        return {name: tensor.detach().to(dtype) for name, tensor in self._named()}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Views of all tensors with their names in a file."""
        for head in range(self.shape.num_heads):
            for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
                yield f"{head}.{layer}.linear.weight", weight[head]
                yield f"{head}.{layer}.linear.bias", bias[head]
            if self.matrices is not None:
                yield f"{head}.{self.shape.num_layers}.weight", self.matrices[head]

    def forward(self, rows: Tensor) -> Tensor:
        """Hidden rows [S, H] → rows [S, heads, H], which an output head turns into logits."""
        assert rows.dim() == 2 and rows.shape[1] == self.shape.hidden_size
        x = rows.expand(self.shape.num_heads, -1, -1)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
        return x.transpose(0, 1)

    def logits(self, rows: Tensor, output_head: OutputHead) -> Tensor:
        """Hidden rows [S, H] → every head's logits [S, heads, V]."""
        x = self(rows.to(next(self.parameters()).dtype))
        if self.matrices is None:
            return output_head(x.flatten(0, 1).to(rows.dtype)).unflatten(0, x.shape[:2])
        return torch.stack([linear(x[:, head], matrix) for head, matrix in enumerate(self.matrices)], dim=1)

    def propose(self, rows: Tensor, output_head: OutputHead, vocab_size: int | None = None) -> Tensor:
        """Hidden rows [S, H] → ids [S, heads]: each head's most likely token, among the first `vocab_size` if given."""
        return self.logits(rows, output_head)[..., :vocab_size].argmax(-1)

    def propose_one(self, head: int, rows: Tensor, output_head: OutputHead, vocab_size: int | None = None) -> Tensor:
        """Hidden rows [S, H] → ids [S] of one head, as `propose` gives them."""
        x = rows.to(next(self.parameters()).dtype)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + silu(linear(x, weight[head], bias[head]))
        logits = output_head(x.to(rows.dtype)) if self.matrices is None else linear(x, self.matrices[head])
        return logits[:, :vocab_size].argmax(-1)

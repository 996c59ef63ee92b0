"""Examples as rows of tokens: the common start of a group is computed once and followed by one branch per example.

A branch attends to the common start and itself, at the positions that it would have alone, so training on a row equals
training on each of its examples separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lorikeet.demo.data.tasks.example import Example

NO_LABEL = -100
COMMON, PADDING = 0, -1
"""Branch ids; branches count from 1."""


@dataclass(frozen=True)
class Batch:
    """B rows of L tokens."""

    input_ids: Tensor
    """[B, L]"""
    position_ids: Tensor
    """[B, L]: as if each branch directly followed the common start."""
    branch_ids: Tensor
    """[B, L]"""
    labels: Tensor
    """[B, L]: the answer's token that comes after this one in the branch, or NO_LABEL."""

    @property
    def mask(self) -> Tensor:
        """[B, 1, L, L]: the columns that a row attends to."""
        row, column = self.branch_ids[:, :, None], self.branch_ids[:, None, :]
        causal = torch.ones(row.shape[1], row.shape[1], dtype=torch.bool, device=row.device).tril()
        return (((row == column) | (column == COMMON)) & causal)[:, None]

    def to(self, device: torch.device) -> "Batch":
        return Batch(
            self.input_ids.to(device), self.position_ids.to(device), self.branch_ids.to(device), self.labels.to(device)
        )

    def ahead(self, distance: int) -> Tensor:
        """[B, L]: the answer's token `distance` after each answer's token in `labels`, NO_LABEL past the end."""
        labels = torch.full_like(self.labels, NO_LABEL)
        later, here = self.branch_ids[:, distance:], self.branch_ids[:, : self.branch_ids.shape[1] - distance]
        inside = (later == here) & (self.labels[:, : labels.shape[1] - distance] != NO_LABEL)
        labels[:, : labels.shape[1] - distance][inside] = self.labels[:, distance:][inside]
        return labels


def pack(groups: Sequence[Sequence[Example]], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """One row per group."""
    rows = [_row(group, tokenizer) for group in groups]
    length = max(len(row[0]) for row in rows)
    fillings = (tokenizer.pad_token_id, 0, PADDING, NO_LABEL)
    columns = [
        torch.tensor([[*row[column], *[filling] * (length - len(row[column]))] for row in rows])
        for column, filling in enumerate(fillings)
    ]
    return Batch(*columns)


def _row(group: Sequence[Example], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], ...]:
    """Input, position and branch ids, and labels."""
    prompts = tokenizer([example.prompt for example in group])["input_ids"]
    answers = tokenizer([example.answer for example in group], add_special_tokens=False)["input_ids"]
    common_len = min(_common_len(prompts), *(len(prompt) - 1 for prompt in prompts))
    input_ids, positions = prompts[0][:common_len], list(range(common_len))
    branches, labels = [COMMON] * common_len, [NO_LABEL] * common_len
    for branch, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
        branch_ids = prompt[common_len:] + answer
        input_ids = input_ids + branch_ids
        positions += range(common_len, common_len + len(branch_ids))
        branches += [branch] * len(branch_ids)
        labels += [NO_LABEL] * (len(branch_ids) - len(answer) - 1) + [*answer, tokenizer.eos_token_id]
    return input_ids, positions, branches, labels


def _common_len(prompts: Sequence[Sequence[int]]) -> int:
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))

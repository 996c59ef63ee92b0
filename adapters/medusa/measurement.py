"""Measures heads: how often each is right, and the tokens per step of a chain of their most likely tokens.

Both are counted on the target's own texts. The chain is replayed as a server would run it: a row's draft tokens are
accepted as long as they match the target's text, and the next row is that of the last accepted token.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lorikeet.adapters.errors import HeadsError
from lorikeet.adapters.medusa.hidden import batches, written_rows
from lorikeet.adapters.medusa.model import MedusaHeads
from lorikeet.adapters.medusa.target import Target
from lorikeet.adapters.medusa.texts import Text

MAX_LOGITS = 2**22


@dataclass(frozen=True)
class ChainReplay:
    """A chain replayed over generated tokens. The first token of a text comes from its prompt, not from a step."""

    tokens: int
    steps: int


@dataclass(frozen=True)
class HeadsReport:
    """The results of one set of heads on some texts."""

    num_texts: int
    num_tokens: int
    """Generated ones."""
    top1: tuple[float, ...]
    """Per head, the share of positions at which its most likely token is the target's."""
    tokens_per_step: float
    greedy_agreement: float
    """Share of generated tokens that are the target's most likely one, recomputed here: less than 1 if another machine,
    another precision or a sampling server generated the texts."""

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        rounded = {name: round(fields[name], 4) for name in ("tokens_per_step", "greedy_agreement")}
        return fields | rounded | {"top1": [round(share, 4) for share in self.top1]}


def replay(output_ids: Sequence[int], proposals: Sequence[Sequence[int]]) -> ChainReplay:
    """`proposals[i]` are the draft tokens of the row of output i for outputs i + 1, i + 2, …"""
    position, steps = 0, 0
    while position + 1 < len(output_ids):
        accepted = 0
        for proposed in proposals[position]:
            if position + 1 + accepted >= len(output_ids) or proposed != output_ids[position + 1 + accepted]:
                break
            accepted += 1
        position = min(position + 1 + accepted, len(output_ids) - 1)  # the target's own token follows the accepted ones
        steps += 1
    return ChainReplay(max(0, len(output_ids) - 1), steps)


def replay_accepted(accepted: Sequence[int]) -> ChainReplay:
    """Replay a chain by the number of accepted draft tokens of each output's row."""
    position, steps, last = 0, 0, len(accepted) - 1
    while position < last:
        position = min(position + 1 + accepted[position], last)
        steps += 1
    return ChainReplay(max(0, last), steps)


@torch.no_grad()
def measure(target: Target, heads: MedusaHeads, texts: Sequence[Text]) -> HeadsReport:
    """Compute every row once, apply every head to it, and replay. Raises HeadsError if there is nothing to measure."""
    num_heads = heads.shape.num_heads
    right, places = [0] * num_heads, [0] * num_heads
    agreed = num_tokens = tokens = steps = 0
    for batch in batches(texts):
        chosen = [texts[i] for i in batch]
        for text, rows in zip(chosen, written_rows(target, chosen), strict=True):
            best, proposals = _best(target, heads, rows)
            for head in range(num_heads):
                labels = text.output_ids[head + 1 :]
                places[head] += len(labels)
                right[head] += sum(p[head] == token for p, token in zip(proposals, labels, strict=False))
            agreed += sum(a == b for a, b in zip(best, text.output_ids, strict=True))
            chain = replay(text.output_ids, proposals)
            num_tokens, tokens, steps = num_tokens + len(best), tokens + chain.tokens, steps + chain.steps
    if not steps:
        raise HeadsError("the target generated at most one token after each prompt, so there is nothing to predict")
    shares = tuple(r / max(1, p) for r, p in zip(right, places, strict=True))
    return HeadsReport(len(texts), num_tokens, shares, tokens / steps, agreed / num_tokens)


def _best(target: Target, heads: MedusaHeads, rows: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """The target's most likely token of each row, and the heads' draft tokens."""
    best: list[int] = []
    proposals: list[list[int]] = []
    for part in rows.split(max(1, MAX_LOGITS // (target.vocab_size * (heads.shape.num_heads + 1)))):
        best += target.logits(part).argmax(-1).tolist()
        proposals += heads.propose(part, target.logits, target.vocab_size).tolist()
    return best, proposals


def table(report: HeadsReport) -> str:
    """The report as a Markdown table."""
    lines = [f"{report.num_texts} held-out texts, {report.num_tokens:,} tokens", "", "| | measured |", "|---|---|"]
    lines += [f"| head {head}, {head + 2} positions ahead: top-1 | {p:.1%} |" for head, p in enumerate(report.top1)]
    lines.append(f"| tokens per step of the chain | {report.tokens_per_step:.3f} |")
    lines.append(f"| greedy agreement with the target | {report.greedy_agreement:.2%} |")
    return "\n".join(lines)

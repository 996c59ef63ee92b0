"""Measures the acceptance rate of the draft model on held-out modules.

Every held-out file, including its end, is cut into rows of at most 1024 tokens; the context of a position is its row up
to there. At each position p is the base's next-token distribution at temperature 1 and q the draft's; a server that
drafts from q and verifies against p accepts a draft token with probability Σ min(p, q). The figure is the mean over all
positions. The committed bf16 weights are cast to float32.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data import corpus
from lorikeet.demo.data.corpus import SourceFile
from lorikeet.demo.training.commands import add_device_argument
from lorikeet.demo.training.distill import DRAFT_FOLDER
from lorikeet.demo.training.model import BASE_FOLDER

ROW_LEN = 1024
BATCH_ROWS = 4
DRAFTED = (1, 2, 3, 4)


@dataclass(frozen=True)
class DraftReport:
    """The printed results."""

    base_parameters: int
    draft_parameters: int
    positions: int
    overlap: float
    """Mean of Σ min(p, q)."""
    same_likeliest: float
    """Share of positions where both have the same most likely token: the acceptance rate at temperature 0."""
    divergence: float
    """Mean of KL(p ‖ q), in nats."""
    base_nats: float
    """Mean entropy of p."""
    tokens_per_step: tuple[float, ...]
    """Tokens per forward pass of the base with 1, 2, 3 … draft tokens, assuming the mean overlap at every position."""


@dataclass(frozen=True)
class Agreement:
    """Agreement of two models' distributions at N positions."""

    # [N] Σ min(p, q), KL(p ‖ q), the entropy of p, and whether the likeliest token is the same
    overlap: Tensor
    divergence: Tensor
    entropy: Tensor
    same_likeliest: Tensor


def agreement(base_logits: Tensor, draft_logits: Tensor) -> Agreement:
    """Both are [N, V]."""
    log_p, log_q = base_logits.float().log_softmax(-1), draft_logits.float().log_softmax(-1)
    p = log_p.exp()
    return Agreement(
        overlap=torch.minimum(p, log_q.exp()).sum(-1),
        divergence=(p * (log_p - log_q)).sum(-1),
        entropy=-(p * log_p).sum(-1),
        same_likeliest=(log_p.argmax(-1) == log_q.argmax(-1)).float(),
    )


def rows_of(files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """The files' tokens; the last token of a file, its end, is only predicted."""
    for file in files:
        token_ids = tokenizer.backend_tokenizer.encode(file.text).ids
        yield from (token_ids[start : start + ROW_LEN] for start in range(0, len(token_ids), ROW_LEN))


@torch.inference_mode()
def compare(base: LlamaForCausalLM, draft: LlamaForCausalLM, rows: Sequence[Sequence[int]]) -> Agreement:
    parts = []
    ordered = sorted(rows, key=len)  # rows of one length can share a forward pass
    start = 0
    while start < len(ordered):
        length = len(ordered[start])
        batch = [row for row in ordered[start : start + BATCH_ROWS] if len(row) == length]
        token_ids = torch.tensor(batch, device=base.device)
        logits = [model(token_ids, use_cache=False).logits.flatten(0, 1) for model in (base, draft)]
        parts.append(agreement(*logits))
        start += len(batch)
    return Agreement(*(torch.cat([getattr(part, name) for part in parts]) for name in Agreement.__dataclass_fields__))


def tokens_per_step(overlap: float, drafted: int) -> float:
    """1 + α + α² + …: the base's own token, and each draft token if all before it were accepted."""
    return math.fsum(overlap**n for n in range(drafted + 1))


def report(base: LlamaForCausalLM, draft: LlamaForCausalLM, rows: Sequence[Sequence[int]]) -> DraftReport:
    comparison = compare(base, draft, rows)
    overlap = comparison.overlap.double().mean().item()
    return DraftReport(
        base_parameters=base.num_parameters(),
        draft_parameters=draft.num_parameters(),
        positions=len(comparison.overlap),
        overlap=round(overlap, 4),
        same_likeliest=round(comparison.same_likeliest.double().mean().item(), 4),
        divergence=round(comparison.divergence.double().mean().item(), 4),
        base_nats=round(comparison.entropy.double().mean().item(), 4),
        tokens_per_step=tuple(round(tokens_per_step(overlap, drafted), 3) for drafted in DRAFTED),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--draft", type=Path, default=DRAFT_FOLDER)
    add_device_argument(parser)


def run(options: argparse.Namespace) -> None:
    base, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(options.device).eval()
        for folder in (options.base, options.draft)
    )
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    measured = report(base, draft, list(rows_of(corpus.held_out_files(), tokenizer)))
    print(f"parameters: base {measured.base_parameters:,}, draft {measured.draft_parameters:,}")
    print(f"mean Σ min(p, q) over {measured.positions:,} held-out positions at temperature 1: {measured.overlap}")
    print(f"same likeliest token: {measured.same_likeliest}")
    for drafted, tokens in zip(DRAFTED, measured.tokens_per_step, strict=True):
        print(f"tokens per step with {drafted} drafted: {tokens}")
    print(json.dumps(asdict(measured)))

"""Measures the adapter `search` on held-out modules: how often a function is among the ten whose vectors are closest to
its description's, next to the base without an adapter.

The functions searched are all of the held-out modules, with and without a description.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from lorikeet.demo.data import corpus
from lorikeet.demo.data.descriptions import codes, described
from lorikeet.demo.training.commands import add_device_argument
from lorikeet.demo.training.model import BASE_FOLDER
from lorikeet.demo.training.search import ADAPTER_FOLDER
from lorikeet.demo.training.search_trainer import embed

BATCH_SIZE = 32
DEPTH = 10


@dataclass(frozen=True)
class SearchReport:
    """The printed results."""

    descriptions: int
    functions: int
    recall_at_10: float
    base_recall_at_10: float
    recall_at_1: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--adapter", type=Path, default=ADAPTER_FOLDER)
    parser.add_argument("--descriptions", type=int, help="the first ones only")
    add_device_argument(parser)


def run(options: argparse.Namespace) -> None:
    files = corpus.held_out_files()
    pairs, texts = described(files)[: options.descriptions], codes(files)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    base = AutoModel.from_pretrained(options.base, dtype=torch.float32).to(options.device).eval()
    positions = [texts.index(pair.code) for pair in pairs]
    descriptions = [pair.description for pair in pairs]
    ranks_bare = ranks(vectors(base, tokenizer, descriptions), vectors(base, tokenizer, texts), positions)
    adapted = PeftModel.from_pretrained(base, options.adapter).eval()
    ranks_adapted = ranks(vectors(adapted, tokenizer, descriptions), vectors(adapted, tokenizer, texts), positions)
    report = SearchReport(
        len(pairs), len(texts), recall(ranks_adapted, DEPTH), recall(ranks_bare, DEPTH), recall(ranks_adapted, 1)
    )
    print(json.dumps(asdict(report)))


@torch.inference_mode()
def vectors(model: nn.Module, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """[texts, H], in order of length, so that the rows of a batch need little padding."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    parts = [
        embed(model, tokenizer, [texts[index] for index in order[first : first + BATCH_SIZE]])
        for first in range(0, len(order), BATCH_SIZE)
    ]
    joined = torch.cat(parts)
    return joined[torch.tensor(order).argsort()]


def ranks(descriptions: Tensor, functions: Tensor, positions: Sequence[int]) -> Tensor:
    """[queries] how many functions are closer to each description than the wanted one. Both are [n, H]."""
    scores = descriptions @ functions.t()
    own_scores = scores.gather(1, torch.tensor(positions, device=scores.device)[:, None])
    return (scores > own_scores).sum(1)


def recall(ranks_found: Tensor, depth: int) -> float:
    """The share of descriptions whose function is among the `depth` closest."""
    return round(float((ranks_found < depth).float().mean()), 4)

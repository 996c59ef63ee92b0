"""Measures the demo adapters on held-out examples of their tasks, compared with the base without an adapter.

Exact match: the greedy text up to EOS must equal the answer.
"""

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.demo.data.tasks.example import held_out_examples
from lorikeet.demo.evaluation import score
from lorikeet.demo.evaluation.score import Written
from lorikeet.demo.training import lora
from lorikeet.demo.training.commands import add_device_argument
from lorikeet.demo.training.lora import RECIPES
from lorikeet.demo.training.model import BASE_FOLDER

NUM_EXAMPLES = 500


@dataclass(frozen=True)
class AdapterRow:
    """The printed results of one adapter."""

    adapter: str
    rank: int
    kind: str
    """LoRA, rsLoRA or DoRA."""
    examples: int
    exact: float
    base_exact: float
    mean_answer_tokens: float
    min_answer_tokens: int
    megabytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(RECIPES), nargs="+", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--adapters", type=Path, default=lora.ADAPTERS_FOLDER)
    parser.add_argument("--examples", type=int, default=NUM_EXAMPLES, help="held-out examples for each")
    add_device_argument(parser)
    parser.add_argument("--show", type=int, default=0, help="print this many wrong answers of each adapter")


def run(options: argparse.Namespace) -> None:
    print("adapter    rank  kind    examples  exact   base    tokens (mean, least)  MB", flush=True)
    rows = []
    for name in options.only:
        row, written = measure(name, options)
        print(_line(row), flush=True)
        _show([result for result in written if not result.is_right][: options.show])
        rows.append(row)
    print(json.dumps([asdict(row) for row in rows]))


def _line(row: AdapterRow) -> str:
    return (
        f"{row.adapter:10} {row.rank:4d}  {row.kind:6}  {row.examples:8d}  {row.exact:6.1%}  {row.base_exact:5.1%}  "
        f"{row.mean_answer_tokens:6.1f}, {row.min_answer_tokens:3d}          {row.megabytes:5.2f}"
    )


def measure(name: str, options: argparse.Namespace) -> tuple[AdapterRow, list[Written]]:
    recipe, folder = RECIPES[name], options.adapters / name
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).to(options.device).eval()
    examples = held_out_examples(importlib.import_module(f"lorikeet.demo.data.tasks.{recipe.task}"), options.examples)
    bare = score.write(base, tokenizer, examples)
    written = score.write(lora.load(base, folder), tokenizer, examples)
    lens = score.answer_lens(tokenizer, examples)
    row = AdapterRow(
        adapter=name,
        rank=recipe.rank,
        kind="DoRA" if recipe.use_dora else "rsLoRA" if recipe.use_rslora else "LoRA",
        examples=len(examples),
        exact=_share_right(written),
        base_exact=_share_right(bare),
        mean_answer_tokens=round(sum(lens) / len(lens), 1),
        min_answer_tokens=min(lens),
        megabytes=round((folder / lora.WEIGHTS_FILE).stat().st_size / 1e6, 2),
    )
    return row, written


def _share_right(written: Sequence[Written]) -> float:
    return round(sum(result.is_right for result in written) / len(written), 4)


def _show(wrong: Sequence[Written]) -> None:
    for result in wrong:
        print(f"--- prompt\n{result.example.prompt}--- wanted\n{result.example.answer}\n--- written\n{result.text}")

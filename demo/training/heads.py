"""Trains Medusa heads as `lorikeet-heads` does: general ones for the base, into `demo/heads`, or those of an adapter.

The committed heads of an adapter were trained together with it, by `lorikeet.demo.training adapters`.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lorikeet.adapters.medusa import training
from lorikeet.adapters.medusa import training as tool
from lorikeet.adapters.medusa.training import HeadsRecipe, HeadsReport, TargetOptions, TrainOptions
from lorikeet.demo.data import corpus
from lorikeet.demo.data.pieces import pieces
from lorikeet.demo.data.tasks import citation
from lorikeet.demo.data.tasks.example import held_out_examples, training_examples
from lorikeet.demo.training import lora
from lorikeet.demo.training.commands import add_run_arguments, add_threads_argument
from lorikeet.demo.training.model import BASE_FOLDER

HEADS_FOLDER = Path(__file__).parents[1] / "heads"


@dataclass(frozen=True)
class HeadsJob:
    """One set of heads: its target, and its prompts for training and evaluation."""

    adapter: str | None
    training_prompts: Callable[[int, int], list[str]]
    """By number and seed."""
    held_out_prompts: Callable[[int], list[str]]
    num_prompts: int
    max_new_tokens: int
    recipe: HeadsRecipe


def code(count: int, seed: int) -> list[str]:
    return pieces(corpus.training_files(), count, seed)


def held_out_code(count: int) -> list[str]:
    return pieces(corpus.held_out_files(), count, seed=0)


def citations(count: int, seed: int) -> list[str]:
    prompts: list[str] = []
    step = 0
    while len(prompts) < count:
        prompts += [example.prompt for example in training_examples(citation, seed, step)[:1]]
        step += 1
    return prompts


def held_out_citations(count: int) -> list[str]:
    return [example.prompt for example in held_out_examples(citation, count)]


ALL = {
    "base": HeadsJob(None, code, held_out_code, 4000, 128, HeadsRecipe(num_heads=3, epochs=6, lr=2e-3)),
    "citation": HeadsJob("citation", citations, held_out_citations, 3000, 128, HeadsRecipe(num_heads=3)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(ALL), nargs="+", default=["base"], metavar="NAME")
    parser.add_argument("--base", type=Path, default=BASE_FOLDER, help="folder of the base model")
    parser.add_argument("--adapters", type=Path, default=lora.ADAPTERS_FOLDER, help="folder of the adapters")
    parser.add_argument("--out", type=Path, default=HEADS_FOLDER, help="folder with one subfolder per set")
    add_run_arguments(parser, "heads")
    add_threads_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    digests = {name: train(name, options, options.out / name, options.work / name)[1] for name in options.only}
    print(json.dumps({"out": str(options.out), "heads_sha256": digests}), flush=True)


def train(name: str, options: argparse.Namespace, out: Path, work: Path) -> tuple[HeadsReport, str]:
    """Like `lorikeet-heads train`; returns its report and the heads' digest."""
    heads = ALL[name]
    work.mkdir(parents=True, exist_ok=True)
    prompts = work / "prompts.json"
    prompts.write_text(json.dumps(heads.training_prompts(heads.num_prompts, options.seed)))
    target = TargetOptions(
        model_id=str(options.base),
        adapter_id=None if heads.adapter is None else str(options.adapters / heads.adapter),
        prompts=prompts,
        max_new_tokens=heads.max_new_tokens,
        batch_size=64,
        device=options.device,
        seed=options.seed,
    )
    recipe = replace(heads.recipe, seed=options.seed)
    measured, digest = tool.train(TrainOptions(target, out, work, recipe, base_name=lora.BASE_NAME))
    print(f"{name}\n\n{training.table(measured)}\n", flush=True)
    return measured, digest

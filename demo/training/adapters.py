"""Trains the LoRA adapters of the built-in demo model, one per task, into `demo/adapters`."""

import argparse
import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.adapters.formats import heads as heads_format
from lorikeet.demo.data.tasks import tool_chat
from lorikeet.demo.data.tasks.example import Example, training_examples
from lorikeet.demo.training import lora
from lorikeet.demo.training.commands import add_run_arguments, add_threads_argument
from lorikeet.demo.training.heads_loss import HeadsLoss
from lorikeet.demo.training.loop import complete
from lorikeet.demo.training.lora import RECIPES, LoraRecipe
from lorikeet.demo.training.lora_trainer import Companion, Groups, LoraTrainer
from lorikeet.demo.training.model import BASE_FOLDER

HEADS_FOLDER = Path(__file__).parents[1] / "heads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(RECIPES), nargs="+", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--base", type=Path, default=BASE_FOLDER, help="folder of the base model")
    parser.add_argument("--out", type=Path, default=lora.ADAPTERS_FOLDER, help="folder with one subfolder per adapter")
    parser.add_argument("--heads-out", type=Path, default=HEADS_FOLDER, help="folder for an adapter's heads")
    add_run_arguments(parser, "adapters", minutes=2.0)
    add_threads_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    digests = {name: train(name, RECIPES[name], options) for name in options.only}
    print(json.dumps({"out": str(options.out), "weights_sha256": digests}), flush=True)


def train(name: str, recipe: LoraRecipe, options: argparse.Namespace) -> str:
    """Returns the digest of the weight file, or an empty text if the run was stopped."""
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).to(options.device)
    torch.manual_seed(options.seed)
    invocation = tokenizer(recipe.invocation, add_special_tokens=False)["input_ids"]
    model = lora.attach(base, recipe, invocation)
    heads = HeadsLoss(recipe.num_heads, base.config.hidden_size, recipe.heads_share).to(options.device)
    companion = Companion(heads, recipe.heads_lr) if recipe.num_heads else None
    trainer = LoraTrainer(model, tokenizer, recipe, groups_of(recipe, options.seed), companion)
    if not complete(trainer, recipe.num_steps, options.work / name / "checkpoint.pt", options, name=name):
        return ""
    folder = options.out / name
    lora.save(model, folder)
    if recipe.own_chat:
        tool_chat.save(tokenizer, folder)
    if companion is not None:
        save_heads(heads, name, options)
    return hashlib.sha256((folder / lora.WEIGHTS_FILE).read_bytes()).hexdigest()


def save_heads(heads: HeadsLoss, name: str, options: argparse.Namespace) -> None:
    """Save heads in a folder of their own, and in one with the adapter, as `lorikeet-heads train --join` does."""
    for folder in (options.heads_out / name, options.heads_out / f"{name}-joined"):
        heads.save(folder, lora.BASE_NAME)
    heads_format.join(options.heads_out / f"{name}-joined", options.out / name)


def groups_of(recipe: LoraRecipe, seed: int) -> Groups:
    """The groups of a step do not depend on the steps before it."""
    task = importlib.import_module(f"lorikeet.demo.data.tasks.{recipe.task}")

    def groups(step: int) -> Sequence[Sequence[Example]]:
        first = step * recipe.groups_per_step
        return [training_examples(task, seed, first + index) for index in range(recipe.groups_per_step)]

    return groups

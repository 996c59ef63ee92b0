"""Trains the LoRA adapters of the embedded base, one per task, into `demo/adapters`.

Knows the options and the order of things; tasks, packing, lora and lora_trainer know the rest.
"""

import argparse
import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.adapters.medusa import format as heads_format
from lorikeet.demo.data.tasks.example import Example, training_examples
from lorikeet.demo.training import lora
from lorikeet.demo.training.heads_loss import HeadsLoss
from lorikeet.demo.training.loop import run_until
from lorikeet.demo.training.lora import RECIPES, Recipe
from lorikeet.demo.training.lora_trainer import Companion, Groups, LoraTrainer
from lorikeet.demo.training.model import BASE_FOLDER

HEADS_FOLDER = Path(__file__).parents[1] / "heads"
DEFAULT_WORK_FOLDER = Path(".demo-train/adapters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(RECIPES), nargs="+", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--base", type=Path, default=BASE_FOLDER, help="what they are adapters of")
    parser.add_argument("--out", type=Path, default=lora.ADAPTERS_FOLDER, help="each goes into a folder of its own")
    parser.add_argument("--heads-out", type=Path, default=HEADS_FOLDER, help="heads that were trained with an adapter")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK_FOLDER, help="checkpoints; a run resumes from here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; the last bits of the weights depend on it")
    parser.add_argument("--stop-after", type=int, help="stop each at this step, leaving a checkpoint to resume from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint-minutes", type=float, default=2.0)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    digests = {name: train(name, RECIPES[name], options) for name in options.only}
    print(json.dumps({"out": str(options.out), "weights_sha256": digests}), flush=True)


def train(name: str, recipe: Recipe, options: argparse.Namespace) -> str:
    """Ends with the digest of the file written, or an empty one if stopped before."""
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).to(options.device)
    torch.manual_seed(options.seed)
    model = lora.attach(base, recipe)
    heads = HeadsLoss(recipe.num_heads, base.config.hidden_size, recipe.heads_share).to(options.device)
    companion = Companion(heads, recipe.heads_lr) if recipe.num_heads else None
    trainer = LoraTrainer(model, tokenizer, recipe, groups_of(recipe, options.seed), companion)
    checkpoint = options.work / name / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
        print(f"{name}: resuming after step {trainer.step}", flush=True)
    stop = min(recipe.num_steps, options.stop_after or recipe.num_steps)
    run_until(stop, trainer, checkpoint, options.checkpoint_minutes * 60, name=name)
    if stop < recipe.num_steps:
        print(f"{name}: stopped after step {stop}; the same command without --stop-after continues", flush=True)
        return ""
    folder = options.out / name
    lora.save(model, folder)
    if companion is not None:
        save_heads(heads, name, options)
    return hashlib.sha256((folder / lora.WEIGHTS_FILE).read_bytes()).hexdigest()


def save_heads(heads: HeadsLoss, name: str, options: argparse.Namespace) -> None:
    """Alone, and once more in one folder with their adapter, as `lorikeet-heads train --join` writes them."""
    for folder in (options.heads_out / name, options.heads_out / f"{name}-joined"):
        heads.save(folder, lora.BASE_NAME)
    heads_format.join(options.heads_out / f"{name}-joined", options.out / name)


def groups_of(recipe: Recipe, seed: int) -> Groups:
    """Every step has groups of its own, whichever steps came before it."""
    task = importlib.import_module(f"lorikeet.demo.data.tasks.{recipe.task}")

    def groups(step: int) -> Sequence[Sequence[Example]]:
        first = step * recipe.groups_per_step
        return [training_examples(task, seed, first + index) for index in range(recipe.groups_per_step)]

    return groups

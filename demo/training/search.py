"""Trains the adapter `search`, which embeds descriptions and code of functions, into `demo/adapters/search`."""

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from lorikeet.demo.data import corpus
from lorikeet.demo.data.descriptions import described
from lorikeet.demo.training import lora
from lorikeet.demo.training.commands import add_run_arguments, add_threads_argument
from lorikeet.demo.training.loop import complete
from lorikeet.demo.training.model import BASE_FOLDER
from lorikeet.demo.training.search_trainer import SearchRecipe, SearchTrainer, attach

ADAPTER_FOLDER = lora.ADAPTERS_FOLDER / "search"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, default=BASE_FOLDER, help="folder of the base model")
    parser.add_argument("--out", type=Path, default=ADAPTER_FOLDER, help="folder of the adapter")
    parser.add_argument("--steps", type=int, help="another number of steps than the recipe's")
    add_run_arguments(parser, "search", minutes=2.0)
    add_threads_argument(parser)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    recipe = SearchRecipe() if options.steps is None else replace(SearchRecipe(), num_steps=options.steps)
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    base = AutoModel.from_pretrained(options.base, dtype=torch.float32).to(options.device)
    torch.manual_seed(options.seed)
    model = attach(base, recipe)
    trainer = SearchTrainer(model, tokenizer, described(corpus.training_files()), recipe, options.seed)
    if not complete(trainer, recipe.num_steps, options.work / "checkpoint.pt", options):
        return
    lora.save(model, options.out)
    digest = hashlib.sha256((options.out / lora.WEIGHTS_FILE).read_bytes()).hexdigest()
    print(json.dumps({"out": str(options.out), "weights_sha256": digest}), flush=True)

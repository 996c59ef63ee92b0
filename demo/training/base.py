"""Trains the built-in demo model and its tokenizer on the standard library's source, into `demo/base`."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data import corpus, mixture, tokenizer
from lorikeet.demo.training import model
from lorikeet.demo.training.commands import add_run_arguments
from lorikeet.demo.training.loop import complete
from lorikeet.demo.training.trainer import DemoTrainer, Recipe, digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=model.BASE_FOLDER, help="folder for the model")
    add_run_arguments(parser, "base", minutes=4.0)
    parser.add_argument("--cycles", type=int, nargs="+", default=Recipe.cycles, help="steps of each cycle")
    parser.add_argument("--matrix-lr", type=float, default=Recipe.matrix_lr)
    parser.add_argument("--other-lr", type=float, default=Recipe.other_lr)
    parser.add_argument("--float32", action="store_true", help="no bf16 in matrix products")
    parser.add_argument("--compile", action="store_true", help="use torch.compile, which needs a C++ compiler")


def run(options: argparse.Namespace) -> None:
    rates = {"matrix_lr": options.matrix_lr, "other_lr": options.other_lr}
    recipe = replace(Recipe(), cycles=tuple(options.cycles), bf16=not options.float32, **rates)
    text_tokenizer, stream = _prepare(options.seed)
    torch.manual_seed(options.seed)
    llama = LlamaForCausalLM(model.base_config()).to(options.device)
    trainer = DemoTrainer(llama, stream, recipe, options.compile)
    checkpoint, per_step = options.work / "checkpoint.pt", recipe.tokens_per_step
    if not complete(trainer, recipe.num_steps, checkpoint, options, tokens_per_step=per_step):
        return
    tokenizer.save(text_tokenizer, options.out)
    model.save(llama, options.out)
    print(json.dumps({"out": str(options.out), "steps": trainer.step, "weights_sha256": digest(llama)}), flush=True)


def _prepare(seed: int) -> tuple[PreTrainedTokenizerFast, mixture.TokenStream]:
    files = corpus.training_files()
    num_bytes = sum(len(file.text.encode()) for file in [*files, *corpus.held_out_files()])
    if num_bytes < corpus.MIN_CORPUS_BYTES:
        problem = f"This interpreter's standard library has {num_bytes:,} bytes of source, fewer than"
        raise SystemExit(f"{problem} {corpus.MIN_CORPUS_BYTES:,}; install one with its test modules.")
    text_tokenizer = tokenizer.train(file.text for file in files)
    pieces = mixture.tokenize(list(mixture.documents(files, seed)), text_tokenizer, seed)
    stream = mixture.TokenStream(pieces, seed)
    size = f"corpus {num_bytes / 1e6:.1f} MB, {len(files)} training modules"
    print(f"{size}, {stream.epoch_len:,} tokens per epoch", flush=True)
    return text_tokenizer, stream

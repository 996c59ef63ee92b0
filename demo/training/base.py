"""Trains the embedded base model and its tokenizer on the standard library's source, into `demo/base`.

Knows the options and the order of things; corpus, tokenizer, mixture and trainer know the rest.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data import corpus, mixture, tokenizer
from lorikeet.demo.training import model
from lorikeet.demo.training.loop import run_until
from lorikeet.demo.training.trainer import Recipe, Trainer, digest

DEFAULT_WORK_FOLDER = Path(".demo-train/base")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=model.BASE_FOLDER, help="where the model goes")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK_FOLDER, help="checkpoints; a run resumes from here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cycles", type=int, nargs="+", default=Recipe.cycles, help="steps of each cycle")
    parser.add_argument("--matrix-lr", type=float, default=Recipe.matrix_lr)
    parser.add_argument("--other-lr", type=float, default=Recipe.other_lr)
    parser.add_argument("--stop-after", type=int, help="stop at this step, leaving a checkpoint to resume from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--float32", action="store_true", help="no bf16 in matrix products")
    parser.add_argument("--compile", action="store_true", help="through torch.compile; needs a C++ compiler")
    parser.add_argument("--checkpoint-minutes", type=float, default=4.0)


def run(options: argparse.Namespace) -> None:
    recipe = replace(
        Recipe(),
        cycles=tuple(options.cycles),
        matrix_lr=options.matrix_lr,
        other_lr=options.other_lr,
        bf16=not options.float32,
    )
    text_tokenizer, stream = _prepare(options.seed)
    torch.manual_seed(options.seed)
    llama = LlamaForCausalLM(model.base_config()).to(options.device)
    trainer = Trainer(llama, stream, recipe, options.compile)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
        print(f"resuming after step {trainer.step}", flush=True)
    stop = min(recipe.num_steps, options.stop_after or recipe.num_steps)
    run_until(stop, trainer, checkpoint, options.checkpoint_minutes * 60, tokens_per_step=recipe.tokens_per_step)
    if stop < recipe.num_steps:
        print(f"stopped after step {stop}; the same command without --stop-after continues", flush=True)
        return
    tokenizer.save(text_tokenizer, options.out)
    model.save(llama, options.out)
    print(json.dumps({"out": str(options.out), "steps": trainer.step, "weights_sha256": digest(llama)}), flush=True)


def _prepare(seed: int) -> tuple[PreTrainedTokenizerFast, mixture.TokenStream]:
    files = corpus.training_files()
    num_bytes = sum(len(file.text.encode()) for file in [*files, *corpus.held_out_files()])
    if num_bytes < corpus.MIN_CORPUS_BYTES:
        raise SystemExit(
            f"This interpreter's standard library has {num_bytes:,} bytes of source, {corpus.MIN_CORPUS_BYTES:,} are "
            "needed; install one with its test modules."
        )
    text_tokenizer = tokenizer.train(file.text for file in files)
    pieces = mixture.tokenize(list(mixture.documents(files, seed)), text_tokenizer, seed)
    stream = mixture.TokenStream(pieces, seed)
    print(
        f"corpus {num_bytes / 1e6:.1f} MB, {len(files)} training modules, {stream.epoch_len:,} tokens an epoch",
        flush=True,
    )
    return text_tokenizer, stream

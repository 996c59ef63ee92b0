"""Distils the draft model from the built-in demo model, into `demo/draft`."""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data import corpus, mixture
from lorikeet.demo.data.mixture import Tokens
from lorikeet.demo.training import model
from lorikeet.demo.training.commands import add_run_arguments, add_threads_argument
from lorikeet.demo.training.distill import DRAFT_FOLDER, Distiller, DraftRecipe, draft_config, initial_embedding
from lorikeet.demo.training.loop import complete
from lorikeet.demo.training.teacher import ROW_LEN, SketchFile
from lorikeet.demo.training.trainer import digest

NUM_ROWS = 4096
"""Rows of 1024 tokens that the base's sketches are made of; they take 1.1 GB of disk."""
NUM_ROWS_FOR_EMBEDDING = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, default=model.BASE_FOLDER)
    parser.add_argument("--out", type=Path, default=DRAFT_FOLDER, help="folder for the draft model")
    add_run_arguments(parser, "draft", minutes=4.0)
    add_threads_argument(parser)
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help=f"rows of {ROW_LEN} tokens to train on")
    parser.add_argument("--steps", type=int, help="steps of a trial run in one cycle")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    recipe = DraftRecipe() if options.steps is None else replace(DraftRecipe(), cycles=(options.steps,))
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.bfloat16).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    rows = _rows(options.work, tokenizer, options.rows, options.seed)
    sketches = SketchFile(options.work, options.rows)
    _fill(sketches, base, rows, options.seed)
    torch.manual_seed(options.seed)
    draft = LlamaForCausalLM(draft_config())
    start = initial_embedding(base.float(), rows[:NUM_ROWS_FOR_EMBEDDING], draft.config.hidden_size)
    draft.get_input_embeddings().weight.data.copy_(start)
    distiller = Distiller(draft.to(options.device), rows, sketches, recipe, options.seed)
    checkpoint, per_step = options.work / "checkpoint.pt", recipe.tokens_per_step
    if not complete(distiller, recipe.num_steps, checkpoint, options, tokens_per_step=per_step):
        return
    model.save(draft, options.out)
    tokenizer.save_pretrained(options.out)
    print(json.dumps({"out": str(options.out), "steps": distiller.step, "weights_sha256": digest(draft)}), flush=True)


def _rows(work: Path, tokenizer: PreTrainedTokenizerFast, num_rows: int, seed: int) -> Tokens:
    """The first num_rows rows of the base's training stream, [num_rows, ROW_LEN]; computed once, then kept."""
    path = work / "rows.npy"
    if not path.exists():
        texts = list(mixture.documents(corpus.training_files(), seed))
        stream = mixture.TokenStream(mixture.tokenize(texts, tokenizer, seed), seed)
        work.mkdir(parents=True, exist_ok=True)
        np.save(path, stream.read(0, num_rows * ROW_LEN).reshape(num_rows, ROW_LEN))
    rows: Tokens = np.load(path)
    if len(rows) != num_rows:
        raise SystemExit(f"{path} has {len(rows)} rows, not {num_rows}; use another --work folder.")
    return rows


def _fill(sketches: SketchFile, base: LlamaForCausalLM, rows: Tokens, seed: int) -> None:
    started, first, printed = time.monotonic(), sketches.rows_done, 0.0
    for done in sketches.fill(base, rows, seed):
        now = time.monotonic()
        if now - printed > 10 or done == sketches.num_rows:
            rate = (done - first) / (now - started)
            print(
                f"sketched {done}/{sketches.num_rows} rows  {rate * ROW_LEN:,.0f} tokens/s  "
                f"{(sketches.num_rows - done) / rate / 60:.1f} min left",
                flush=True,
            )
            printed = now

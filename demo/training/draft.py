"""Distils the draft model from the embedded base, into `demo/draft`.

Knows the options and the order of things; teacher and distill know the rest.
"""

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
from lorikeet.demo.training.distill import DRAFT_FOLDER, Distiller, DraftRecipe, draft_config, initial_embedding
from lorikeet.demo.training.loop import run_until
from lorikeet.demo.training.teacher import ROW_LEN, SketchFile
from lorikeet.demo.training.trainer import digest

DEFAULT_WORK_FOLDER = Path(".demo-train/draft")
NUM_ROWS = 4096
"""Of 1024 tokens each; the base's laws along them take 1.1 GB of disk."""
NUM_ROWS_FOR_EMBEDDING = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, default=model.BASE_FOLDER)
    parser.add_argument("--out", type=Path, default=DRAFT_FOLDER, help="where the draft goes")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK_FOLDER, help="checkpoints; a run resumes from here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; the last bits of the weights depend on it")
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help=f"of {ROW_LEN} tokens, on which the base is asked")
    parser.add_argument("--steps", type=int, help="of a run in one cycle, for a look")
    parser.add_argument("--stop-after", type=int, help="stop at this step, leaving a checkpoint to resume from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint-minutes", type=float, default=4.0)


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    recipe = DraftRecipe() if options.steps is None else replace(DraftRecipe(), cycles=(options.steps,))
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.bfloat16).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    rows = _rows(options.work, tokenizer, options.rows, options.seed)
    laws = SketchFile(options.work, options.rows)
    _ask(laws, base, rows, options.seed)
    torch.manual_seed(options.seed)
    draft = LlamaForCausalLM(draft_config())
    start = initial_embedding(base.float(), rows[:NUM_ROWS_FOR_EMBEDDING], draft.config.hidden_size)
    draft.get_input_embeddings().weight.data.copy_(start)
    distiller = Distiller(draft.to(options.device), rows, laws, recipe, options.seed)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.exists():
        distiller.resume(checkpoint)
        print(f"resuming after step {distiller.step}", flush=True)
    stop = min(recipe.num_steps, options.stop_after or recipe.num_steps)
    run_until(stop, distiller, checkpoint, options.checkpoint_minutes * 60, tokens_per_step=recipe.tokens_per_step)
    if stop < recipe.num_steps:
        print(f"stopped after step {stop}; the same command without --stop-after continues", flush=True)
        return
    model.save(draft, options.out)
    tokenizer.save_pretrained(options.out)
    print(json.dumps({"out": str(options.out), "steps": distiller.step, "weights_sha256": digest(draft)}), flush=True)


def _rows(work: Path, tokenizer: PreTrainedTokenizerFast, num_rows: int, seed: int) -> Tokens:
    """The first num_rows rows of the stream that the base was trained on, [num_rows, ROW_LEN]; cut once, then kept."""
    path = work / "rows.npy"
    if not path.exists():
        texts = list(mixture.documents(corpus.training_files(), seed))
        stream = mixture.TokenStream(mixture.tokenize(texts, tokenizer, seed), seed)
        work.mkdir(parents=True, exist_ok=True)
        np.save(path, stream.read(0, num_rows * ROW_LEN).reshape(num_rows, ROW_LEN))
    rows: Tokens = np.load(path)
    if len(rows) != num_rows:
        raise SystemExit(f"{path} has {len(rows)} rows, {num_rows} are wanted; use another --work folder.")
    return rows


def _ask(laws: SketchFile, base: LlamaForCausalLM, rows: Tokens, seed: int) -> None:
    started, first, printed = time.monotonic(), laws.rows_done, 0.0
    for done in laws.fill(base, rows, seed):
        now = time.monotonic()
        if now - printed > 10 or done == laws.num_rows:
            rate = (done - first) / (now - started)
            print(
                f"asked the base about {done}/{laws.num_rows} rows  {rate * ROW_LEN:,.0f} tokens/s  "
                f"{(laws.num_rows - done) / rate / 60:.1f} min left",
                flush=True,
            )
            printed = now

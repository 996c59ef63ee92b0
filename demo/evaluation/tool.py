"""Trains heads for a finished adapter with `lorikeet-heads`, and compares them with the committed ones."""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from lorikeet.adapters.medusa import training
from lorikeet.adapters.medusa.target import DevicePlacement, Target
from lorikeet.demo.evaluation.heads import NUM_TEXTS, load, write
from lorikeet.demo.training import lora
from lorikeet.demo.training.commands import add_device_argument
from lorikeet.demo.training.heads import ALL, HEADS_FOLDER, train
from lorikeet.demo.training.model import BASE_FOLDER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=[name for name in ALL if ALL[name].adapter], default="citation")
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--adapters", type=Path, default=lora.ADAPTERS_FOLDER)
    parser.add_argument("--heads", type=Path, default=HEADS_FOLDER)
    parser.add_argument("--work", type=Path, help="folder to resume a stopped run from; its time starts from zero")
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help="held-out texts")
    parser.add_argument("--seed", type=int, default=0)
    add_device_argument(parser)


def run(options: argparse.Namespace) -> None:
    name = options.only
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        train(name, options, Path(folder) / "heads", options.work or Path(folder) / "work")
        seconds = time.monotonic() - started
        adapter = options.adapters / str(ALL[name].adapter)
        target = Target(str(options.base), str(adapter), DevicePlacement(torch.device(options.device), torch.float32))
        written = write(target, name, options.texts)
        by_tool = training.measure(target, load(Path(folder) / "heads", target), written)
        committed = training.measure(target, load(options.heads / name, target), written)
    share = by_tool.tokens_per_step / committed.tokens_per_step
    print(
        f"{name}: {by_tool.tokens_per_step:.3f} tokens per step after {seconds / 60:.1f} minutes of the tool, "
        f"{committed.tokens_per_step:.3f} with the committed heads: {share:.3f} times"
    )
    results = {"seconds": round(seconds, 1), "by_tool": by_tool.as_json(), "committed": committed.as_json()}
    print(json.dumps({"heads": name, **results}), flush=True)

"""Measures the demo Medusa heads on held-out code and on held-out examples of the adapters' tasks.

Tokens per step are those of a chain of the heads' most likely tokens, compared with the target's greedy text: every
step gives the accepted tokens and one more. General heads are measured on the adapters' tasks too, for comparison.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from lorikeet.adapters.formats import heads as heads_format
from lorikeet.adapters.formats.heads import MedusaHeads
from lorikeet.adapters.medusa import texts, training
from lorikeet.adapters.medusa.target import DevicePlacement, Target
from lorikeet.adapters.medusa.texts import Text, TextStore, Writing
from lorikeet.adapters.medusa.training import HeadsReport
from lorikeet.demo.training import lora
from lorikeet.demo.training.commands import add_device_argument
from lorikeet.demo.training.heads import ALL, HEADS_FOLDER
from lorikeet.demo.training.model import BASE_FOLDER

NUM_TEXTS = 100


@dataclass(frozen=True)
class HeadsResult:
    """One set of heads on one kind of text."""

    heads: str
    text: str
    report: HeadsReport

    def as_json(self) -> dict[str, object]:
        return {"heads": self.heads, "text": self.text, **self.report.as_json()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--adapters", type=Path, default=lora.ADAPTERS_FOLDER)
    parser.add_argument("--heads", type=Path, default=HEADS_FOLDER)
    parser.add_argument("--only", choices=list(ALL), nargs="+", default=list(ALL), metavar="NAME")
    parser.add_argument("--texts", type=int, default=NUM_TEXTS, help="held-out texts of each kind")
    add_device_argument(parser)


def run(options: argparse.Namespace) -> None:
    rows = [row for kind in options.only for row in measure(kind, options)]
    print("| heads | on | tokens per step | top-1 of each head |\n|---|---|---|---|")
    for row in rows:
        shares = " ".join(f"{share:.1%}" for share in row.report.top1)
        print(f"| {row.heads} | {row.text} | {row.report.tokens_per_step:.3f} | {shares} |")
    print(json.dumps([row.as_json() for row in rows]), flush=True)


def measure(kind: str, options: argparse.Namespace) -> list[HeadsResult]:
    """Every set of heads for this kind of text, on the same texts."""
    adapter = ALL[kind].adapter
    names = ["base"] if adapter is None else ["base", kind, f"{kind}-joined"]
    folder = None if adapter is None else str(options.adapters / adapter)
    target = Target(str(options.base), folder, DevicePlacement(torch.device(options.device), torch.float32))
    written = write(target, kind, options.texts)
    return [
        HeadsResult(name, kind, training.measure(target, load(options.heads / name, target), written)) for name in names
    ]


def write(target: Target, kind: str, count: int) -> list[Text]:
    """The target's texts for the held-out prompts of this kind."""
    encoded = texts.encode_prompts(ALL[kind].held_out_prompts(count), target.tokenizer)
    store = TextStore(None, {})
    texts.write_with_target(target, encoded, store, Writing(ALL[kind].max_new_tokens, 50, lambda done, of: None))
    return texts.texts(encoded, store)


def load(folder: Path, target: Target) -> MedusaHeads:
    return MedusaHeads.of(heads_format.read(folder, print)).to(target.place.device)

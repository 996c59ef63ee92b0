"""The two commands of `lorikeet-heads`, from options to report. Each step is a module of this folder."""

import hashlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lorikeet.adapters.errors import HeadsError, first_line
from lorikeet.adapters.medusa import format as files
from lorikeet.adapters.medusa import measurement, texts
from lorikeet.adapters.medusa.format import HeadsFile
from lorikeet.adapters.medusa.hidden import HiddenFiles
from lorikeet.adapters.medusa.measurement import HeadsReport
from lorikeet.adapters.medusa.model import MedusaHeads
from lorikeet.adapters.medusa.target import DevicePlacement, Target, heads_folder
from lorikeet.adapters.medusa.texts import EncodedPrompt, Text, TextStore, Writing
from lorikeet.adapters.medusa.training import HeadsRecipe, HeadsTrainer

CHECKPOINT_S = 60.0
PROGRESS_S = 5.0
OWN_PROMPTS = 1000
"""Default number of prompts that the target samples."""


@dataclass(frozen=True)
class TargetOptions:
    """The target, its prompts, and how its texts are generated."""

    model_id: str
    adapter_id: str | None = None
    prompts: Path | None = None
    """None: the target samples its own."""
    url: str | None = None
    """A server that generates the texts; None: this process does."""
    num_own_prompts: int = OWN_PROMPTS
    max_new_tokens: int = 256
    batch_size: int = 32
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0


@dataclass(frozen=True)
class TrainOptions:
    """Options of `lorikeet-heads train`."""

    target: TargetOptions
    out: Path
    work: Path
    recipe: HeadsRecipe = field(default_factory=HeadsRecipe)
    held_out: float = 0.05
    """Share of the texts that are only used for evaluation."""
    join: bool = False
    base_name: str | None = None
    """Name of the base in the files; None: its model id."""


class ProgressPrinter:
    """Prints to stderr at most once in PROGRESS_S seconds, and at the end of each part."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._printed, self._before = time.monotonic(), 0

    def __call__(self, done: int, of: int, note: str = "") -> None:
        now = time.monotonic()
        if (now - self._printed < PROGRESS_S and done < of) or done == self._before:
            return
        minutes = (of - done) * (now - self._printed) / (done - self._before) / 60
        self._printed, self._before = now, done
        say(f"{self._what}: {done:,} of {of:,} {self._unit}{f', {minutes:.1f} min left' if done < of else ''}{note}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train(options: TrainOptions) -> tuple[HeadsReport, str]:
    """Generate texts, compute rows, train, write files; returns the report on held-out texts and the heads' digest."""
    if options.join and options.target.adapter_id is None:
        raise HeadsError("--join needs --adapter-id, the adapter to join with the heads")
    target = _target(options.target)
    written, settings = _texts(target, options.target, options.work)
    held_out, training = split(written, options.held_out, options.target.seed)
    heads = _train(target, training, options, settings)
    name = options.base_name or options.target.model_id
    files.write(options.out, HeadsFile(heads.shape, heads.tensors(target.stored_dtype), name))
    if options.join and target.adapter_folder is not None:
        files.join(options.out, target.adapter_folder)
    saved = files.read(options.out, say)
    measured = measurement.measure(target, MedusaHeads.of(saved).to(target.place.device), held_out)
    return measured, digest(saved)


def evaluate(options: TargetOptions, heads: str, work: Path | None = None) -> HeadsReport:
    """Measure heads, a folder or hub id, on the target's texts."""
    folder = heads_folder(heads)
    heads_file = files.read(folder, say)
    if options.adapter_id is None and (folder / files.ADAPTER_FILES[0]).is_file():
        options = replace(options, adapter_id=heads)  # joined: one name for both
    target = _target(options)
    check_fit(heads_file, target, heads, options.model_id)
    written, _ = _texts(target, options, work)
    return measurement.measure(target, MedusaHeads.of(heads_file).to(target.place.device), written)


def check_fit(heads: HeadsFile, target: Target, name: str, base: str) -> None:
    """Raises HeadsError for another hidden size than the base's; warns about another vocabulary size."""
    if heads.shape.hidden_size != target.hidden_size:
        problem = f"they are made for hidden size {heads.shape.hidden_size}, the base has {target.hidden_size}"
        raise HeadsError(f"the heads {name} do not fit the base {base}: {problem}")
    if heads.shape.vocab_size not in (None, target.vocab_size):
        sizes = f"the heads {name} have {heads.shape.vocab_size} tokens, the base {target.vocab_size}"
        say(f"{sizes}: only tokens of both are proposed")


def split(written: Sequence[Text], share: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Held-out texts and the others. Texts of equal prompts stay together."""
    prompts = sorted({text.prompt_ids for text in written})
    if len(prompts) < 2:
        raise HeadsError("training needs at least two different prompts with answers, because one is held out")
    count = min(len(prompts) - 1, max(1, round(share * len(prompts))))
    chosen = set(random.Random(f"{seed} held out").sample(prompts, count))
    return [t for t in written if t.prompt_ids in chosen], [t for t in written if t.prompt_ids not in chosen]


def digest(heads: HeadsFile) -> str:
    """SHA-256 over all tensors by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(heads.tensors.items()):
        total.update(name.encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _target(options: TargetOptions) -> Target:
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise HeadsError(f"the device {options.device} is not available: {first_line(error)}") from None
    return Target(options.model_id, options.adapter_id, DevicePlacement(device, getattr(torch, options.dtype)))


def _texts(target: Target, options: TargetOptions, work: Path | None) -> tuple[list[Text], dict[str, Any]]:
    """The target's texts, and the settings that they depend on."""
    encoded = _prompts(target, options)
    fitting = texts.fitting(encoded, target, options.max_new_tokens)
    if len(fitting) < len(encoded):
        count = len(encoded) - len(fitting)
        say(f"{count} prompts are left out: they leave no room for {options.max_new_tokens} tokens")
    settings = texts.settings_of(target, fitting, options.max_new_tokens)
    writing = Writing(options.max_new_tokens, options.batch_size, ProgressPrinter("texts", "texts"))
    store = TextStore(None if work is None else work / "texts.jsonl", settings)
    try:
        if options.url is None:
            texts.write_with_target(target, fitting, store, writing)
        else:
            texts.write_with_server(options.url, options.adapter_id, fitting, store, writing)
    finally:
        store.close()
    return texts.texts(fitting, store), settings


def _prompts(target: Target, options: TargetOptions) -> list[EncodedPrompt]:
    if options.prompts is not None:
        return texts.encode_prompts(texts.read_prompts(options.prompts), target.tokenizer)
    say("no prompt file: the target samples its own prompts, which suits general heads, not those of one task")
    sampled = texts.own_prompts(target, options.num_own_prompts, options.batch_size, options.seed)
    if len(sampled) < options.num_own_prompts:
        say(f"the target sampled {len(sampled)} different prompts, not {options.num_own_prompts}")
    return sampled


def _train(target: Target, training: Sequence[Text], options: TrainOptions, settings: dict[str, Any]) -> MedusaHeads:
    seed = options.target.seed
    settings = settings | {"seed": seed, "held_out": options.held_out, "dtype": options.target.dtype}
    rows = HiddenFiles(options.work / "rows", training, target.hidden_size, seed)
    rows.compute(target, settings, ProgressPrinter("hidden rows", "rows"))
    trainer = HeadsTrainer(options.recipe, rows, target)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.exists():
        if trainer.resume(checkpoint, settings):
            say(f"resuming after step {trainer.step}")
        else:
            say(f"{checkpoint} belongs to another run: training starts from the beginning")
    progress, saved, recent = ProgressPrinter("training", "steps"), time.monotonic(), list[float]()
    for loss in trainer.run():
        recent = [*recent[-49:], loss]
        progress(trainer.step, trainer.num_steps, f", loss {sum(recent) / len(recent):.3f} nats")
        if time.monotonic() - saved > CHECKPOINT_S or trainer.step == trainer.num_steps:
            trainer.save(checkpoint, settings)
            saved = time.monotonic()
    return trainer.heads

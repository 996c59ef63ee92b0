"""Both things the tool does, from options to report: their order. Each step of them is a module beside this one."""

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
from lorikeet.adapters.medusa import prompts, remote, report, sources, texts
from lorikeet.adapters.medusa.format import HeadsFile
from lorikeet.adapters.medusa.hidden import HiddenFiles
from lorikeet.adapters.medusa.model import MedusaHeads
from lorikeet.adapters.medusa.prompts import EncodedPrompt
from lorikeet.adapters.medusa.report import Report
from lorikeet.adapters.medusa.target import Place, Target
from lorikeet.adapters.medusa.texts import Text, TextStore, Writing
from lorikeet.adapters.medusa.training import HeadsTrainer, Recipe, Vocabulary

CHECKPOINT_S = 60.0
PROGRESS_S = 5.0
OWN_PROMPTS = 1000
"""How many a target makes up where nobody says."""


@dataclass(frozen=True)
class Asked:
    """Which target writes what, where."""

    model_id: str
    adapter_id: str | None = None
    prompts: Path | None = None
    """None: the target makes up its own."""
    url: str | None = None
    """A server that writes; None: this process does."""
    num_own_prompts: int = OWN_PROMPTS
    max_new_tokens: int = 256
    batch_size: int = 32
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0


@dataclass(frozen=True)
class TrainOptions:
    """Of `lorikeet-heads train`."""

    asked: Asked
    out: Path
    work: Path
    recipe: Recipe = field(default_factory=Recipe)
    held_out: float = 0.05
    """Share of the texts that heads are measured on and never see."""
    join: bool = False
    base_name: str | None = None
    """How the files name the base; None: as it was asked for."""


@dataclass(frozen=True)
class EvalOptions:
    """Of `lorikeet-heads eval`."""

    asked: Asked
    heads: str
    work: Path | None = None


class Progress:
    """Lines on stderr: at most one in PROGRESS_S seconds, and one at the end of each part."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._printed, self._before = time.monotonic(), 0

    def __call__(self, done: int, of: int, note: str = "") -> None:
        now = time.monotonic()
        if (now - self._printed < PROGRESS_S and done < of) or done == self._before:
            return
        left = (of - done) * (now - self._printed) / (done - self._before) / 60
        self._printed, self._before = now, done
        say(f"{self._what}: {done:,} of {of:,} {self._unit}{f', {left:.1f} min left' if done < of else ''}{note}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train(options: TrainOptions) -> tuple[Report, str]:
    """Texts, rows, training, files, and the report on texts held out; beside it the digest of the written heads."""
    if options.join and options.asked.adapter_id is None:
        raise HeadsError("there is nothing to join the heads with: --join needs --adapter-id")
    target = _target(options.asked)
    written, settings = _texts(target, options.asked, options.work)
    held_out, kept = split(written, options.held_out, options.asked.seed)
    heads = _train(target, kept, options, settings)
    name = options.base_name or options.asked.model_id
    files.write(options.out, HeadsFile(heads.shape, heads.tensors(target.stored_dtype), name))
    if options.join and target.adapter_folder is not None:
        files.join(options.out, target.adapter_folder)
    saved = files.read(options.out, say)
    found = report.measure(target, MedusaHeads.of(saved).to(target.place.device), held_out)
    return found, digest(saved)


def evaluate(options: EvalOptions) -> Report:
    """Any heads, on what the target writes to these prompts."""
    folder = sources.heads_folder(options.heads)
    heads_file = files.read(folder, say)
    asked = options.asked
    if asked.adapter_id is None and (folder / files.ADAPTER_FILES[0]).is_file():
        asked = replace(asked, adapter_id=options.heads)  # joined: one name for both
    target = _target(asked)
    check_fit(heads_file, target, options)
    written, _ = _texts(target, asked, options.work)
    return report.measure(target, MedusaHeads.of(heads_file).to(target.place.device), written)


def check_fit(heads: HeadsFile, target: Target, options: EvalOptions) -> None:
    """Raises HeadsError where heads are of another size than the base; says where only a name or the tail differs."""
    if heads.shape.hidden_size != target.hidden_size:
        raise HeadsError(
            f"the heads {options.heads} do not fit the base {options.asked.model_id}: they are made for hidden size "
            f"{heads.shape.hidden_size}, the base has {target.hidden_size}"
        )
    if heads.shape.vocab_size not in (None, target.vocab_size):
        say(
            f"the heads {options.heads} know {heads.shape.vocab_size} tokens, the base {target.vocab_size}: "
            "proposals are taken among those that both know"
        )


def split(written: Sequence[Text], share: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Held-out texts and the others. Equal prompts, if there are any, go to the same side."""
    asked = sorted({text.prompt_ids for text in written})
    if len(asked) < 2:
        raise HeadsError("at least two different prompts are needed, with an answer each: one is held out")
    count = min(len(asked) - 1, max(1, round(share * len(asked))))
    chosen = set(random.Random(f"{seed} held out").sample(asked, count))
    return [t for t in written if t.prompt_ids in chosen], [t for t in written if t.prompt_ids not in chosen]


def digest(heads: HeadsFile) -> str:
    """SHA-256 over all tensors by name."""
    total = hashlib.sha256()
    for name, tensor in sorted(heads.tensors.items()):
        total.update(name.encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _target(asked: Asked) -> Target:
    try:
        device = torch.device(asked.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise HeadsError(f"the device {asked.device} is not there: {first_line(error)}") from None
    return Target(asked.model_id, asked.adapter_id, Place(device, getattr(torch, asked.dtype)))


def _texts(target: Target, asked: Asked, work: Path | None) -> tuple[list[Text], dict[str, Any]]:
    """What the target wrote, and what it depends on."""
    encoded = _prompts(target, asked)
    fitting = texts.fitting(encoded, target, asked.max_new_tokens)
    if len(fitting) < len(encoded):
        say(f"{len(encoded) - len(fitting)} prompts are left out: they leave no room for {asked.max_new_tokens} tokens")
    settings = texts.settings_of(target, fitting, asked.max_new_tokens)
    writing = Writing(asked.max_new_tokens, asked.batch_size, Progress("writing", "texts"))
    store = TextStore(None if work is None else work / "texts.jsonl", settings)
    try:
        if asked.url is None:
            texts.write(target, fitting, store, writing)
        else:
            remote.write(asked.url, asked.adapter_id, fitting, store, writing)
    finally:
        store.close()
    return texts.texts(fitting, store), settings


def _prompts(target: Target, asked: Asked) -> list[EncodedPrompt]:
    if asked.prompts is not None:
        return prompts.encode(prompts.read(asked.prompts), target.tokenizer)
    say("no prompt file: the target makes up its own prompts, which suits heads for no task in particular")
    made = texts.own_prompts(target, asked.num_own_prompts, asked.batch_size, asked.seed)
    if len(made) < asked.num_own_prompts:
        say(f"the target made up {len(made)} different prompts, not {asked.num_own_prompts}")
    return made


def _train(target: Target, kept: Sequence[Text], options: TrainOptions, settings: dict[str, Any]) -> MedusaHeads:
    rows_depend_on = settings | {"seed": options.asked.seed, "held_out": options.held_out, "dtype": options.asked.dtype}
    rows = HiddenFiles(options.work / "rows", kept, target.hidden_size, options.asked.seed)
    rows.compute(target, rows_depend_on, Progress("hidden rows", "rows"))
    vocabulary = Vocabulary(target.vocab_size, target.hidden_size, target.place.device)
    trainer = HeadsTrainer(options.recipe, rows, target.logits, vocabulary)
    checkpoint = options.work / "checkpoint.pt"
    if checkpoint.exists():
        if trainer.resume(checkpoint, rows_depend_on):
            say(f"resuming after step {trainer.step}")
        else:
            say(f"{checkpoint} is of another training: this one begins anew")
    told, saved, recent = Progress("training", "steps"), time.monotonic(), list[float]()
    for loss in trainer.run():
        recent = [*recent[-49:], loss]
        told(trainer.step, trainer.num_steps, f", loss {sum(recent) / len(recent):.3f} nats")
        if time.monotonic() - saved > CHECKPOINT_S or trainer.step == trainer.num_steps:
            trainer.save(checkpoint, rows_depend_on)
            saved = time.monotonic()
    return trainer.heads

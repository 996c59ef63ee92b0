"""Trains heads on hidden rows, measures them, and runs the two commands of `lorikeet-heads`.

A training is a function of recipe and rows. Measured are how often each head is right, and the tokens per step of a
chain of their most likely tokens, on the target's own texts. The chain is replayed as a server would run it: a row's
draft tokens are accepted as long as they match the target's text; the next row is that of the last accepted token.
"""

import hashlib
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lorikeet.adapters.errors import HeadsError, first_line
from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import HeadsFile, MedusaHeads, MedusaShape, OutputHead
from lorikeet.adapters.medusa import texts
from lorikeet.adapters.medusa.target import DevicePlacement, Target, heads_folder
from lorikeet.adapters.medusa.texts import (
    NOTHING,
    EncodedPrompt,
    HiddenFiles,
    Shard,
    Text,
    TextStore,
    Writing,
    batches,
    written_rows,
)

LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**25}
"""Logits computed at a time, for any step size: as many as fit in a cache, or keep a GPU busy."""


@dataclass(frozen=True)
class HeadsRecipe:
    """Everything that the heads depend on, except the rows."""

    num_heads: int = 3
    num_layers: int = 1
    epochs: int = 4
    rows_per_step: int = 1024
    lr: float = 1e-3
    warmup: float = 0.1
    """Share of the steps during which the learning rate rises; then it falls along a cosine to zero."""
    seed: int = 0
    bf16: bool = True
    """Whether matrix products use bfloat16."""

    def lr_at(self, step: int, num_steps: int) -> float:
        rising = max(1, int(self.warmup * num_steps))
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, num_steps - rising)))


class _FrozenHeadLoss(torch.autograd.Function):
    """Cross entropy through a frozen output head, in pieces, so that the full logits never exist.

    Semantics: sum over rows of cross_entropy(output_head(row), label), rows labelled NOTHING left out.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: Tensor, output_head: OutputHead, vocab_size: int, bf16: bool) -> Tensor:
        """`rows` [S, H], `labels` [S]."""
        gradient = torch.empty_like(rows)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        for start in range(0, len(rows), piece := max(1, LOGITS_AT_ONCE.get(rows.device.type, 2**24) // vocab_size)):
            chosen = slice(start, start + piece)
            with torch.enable_grad():
                part = rows[chosen].detach().requires_grad_()
                with torch.autocast(rows.device.type, torch.bfloat16, enabled=bf16):
                    logits = output_head(part).float()
                loss = cross_entropy(logits, labels[chosen], ignore_index=NOTHING, reduction="sum")
            (gradient[chosen],) = torch.autograd.grad(loss, part)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0], None, None, None, None


class HeadsOptimizer:
    """Heads in training, and their optimizer."""

    def __init__(self, heads: MedusaHeads, recipe: HeadsRecipe, output_head: OutputHead, vocab_size: int) -> None:
        """`output_head`: of the target, with what follows it."""
        self.heads, self.recipe = heads, recipe
        self.output = output_head, vocab_size
        """Rows to logits of the labels, and how many labels there are."""
        self.state = torch.optim.AdamW(heads.parameters(), lr=recipe.lr, weight_decay=0.0)

    def take(self, rows: Tensor, labels: Tensor, lr: float) -> float:
        """One step on `rows` [S, H] and `labels` [S, heads]; returns its loss in nats per prediction."""
        for group in self.state.param_groups:
            group["lr"] = lr
        loss = self.loss(rows, labels)
        loss.backward()
        self.state.step()
        self.state.zero_grad(set_to_none=True)
        return loss.item()

    def loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Mean over rows of the sum over heads, divided by heads."""
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            ahead = self.heads(rows.float()).flatten(0, 1)
        total: Tensor = _FrozenHeadLoss.apply(ahead.float(), labels.flatten(), *self.output, self.recipe.bf16)
        return total / max(1, int((labels != NOTHING).sum()))


class HeadsTrainer:
    """The heads, their optimizer and the number of steps done."""

    def __init__(self, recipe: HeadsRecipe, files: HiddenFiles, target: Target) -> None:
        self.recipe = recipe
        self.heads = MedusaHeads(MedusaShape(recipe.num_heads, recipe.num_layers, target.hidden_size))
        self.heads.to(target.place.device)
        self.step = 0
        self._files, self._device = files, target.place.device
        self._optimizer = HeadsOptimizer(self.heads, recipe, target.logits, target.vocab_size)
        per_epoch = sum(math.ceil(rows / recipe.rows_per_step) for rows in files.num_rows)
        self.num_steps = recipe.epochs * per_epoch

    def run(self) -> Iterator[float]:
        """Run the remaining steps; yields each step's loss in nats per prediction."""
        for rows, labels in self._batches(self.step):
            loss = self._optimizer.take(rows, labels, self.recipe.lr_at(self.step, self.num_steps))
            self.step += 1
            yield loss

    def _batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and labels of step `start` and all later ones. One shard is in memory at a time."""
        step, size = 0, self.recipe.rows_per_step
        held: tuple[int, Shard, Tensor] | None = None
        for epoch in range(self.recipe.epochs):
            for number in _shuffled(len(self._files.num_rows), self.recipe.seed, epoch, "shards").tolist():
                num_batches = math.ceil(self._files.num_rows[number] / size)
                if step + num_batches <= start:
                    step += num_batches
                    continue
                if held is None or held[0] != number:
                    shard = self._files.load(number, self._device)
                    held = number, shard, shard.labels(self.recipe.num_heads)
                order = _shuffled(self._files.num_rows[number], self.recipe.seed, epoch, f"rows {number}")
                for batch in order.to(self._device).split(size):
                    if step >= start:
                        yield held[1].rows[batch], held[2][batch]
                    step += 1

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """The file appears complete or not at all."""
        state = {
            "settings": settings,
            "recipe": asdict(self.recipe),
            "step": self.step,
            "heads": self.heads.state_dict(),
            "optimizer": self._optimizer.state.state_dict(),
        }
        scratch = path.with_suffix(".part")
        torch.save(state, scratch)
        os.replace(scratch, path)

    def resume(self, path: Path, settings: dict[str, Any]) -> bool:
        """Resume from a checkpoint of the same recipe and rows; returns False for others."""
        state: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
        if state["recipe"] != asdict(self.recipe) or state["settings"] != settings:
            return False
        self.heads.load_state_dict(state["heads"])
        self._optimizer.state.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return True


def _shuffled(count: int, seed: int, epoch: int, what: str) -> Tensor:
    """0 … count − 1 in an order that depends only on seed, epoch and name."""
    hashed = hashlib.sha256(f"{seed} {epoch} {what}".encode()).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(hashed[:7], "big")))


MAX_LOGITS = 2**22


@dataclass(frozen=True)
class ChainReplay:
    """A chain replayed over generated tokens. The first token of a text comes from its prompt, not from a step."""

    tokens: int
    steps: int


@dataclass(frozen=True)
class HeadsReport:
    """The results of one set of heads on some texts."""

    num_texts: int
    num_tokens: int
    """Generated ones."""
    top1: tuple[float, ...]
    """Per head, the share of positions at which its most likely token is the target's."""
    tokens_per_step: float
    greedy_agreement: float
    """Share of generated tokens that are the target's most likely one, recomputed here: less than 1 if another machine,
    another precision or a sampling server generated the texts."""

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        rounded = {name: round(fields[name], 4) for name in ("tokens_per_step", "greedy_agreement")}
        return fields | rounded | {"top1": [round(share, 4) for share in self.top1]}


def replay(output_ids: Sequence[int], proposals: Sequence[Sequence[int]]) -> ChainReplay:
    """`proposals[i]` are the draft tokens of the row of output i for outputs i + 1, i + 2, …"""
    position, steps = 0, 0
    while position + 1 < len(output_ids):
        accepted = 0
        for proposed in proposals[position]:
            if position + 1 + accepted >= len(output_ids) or proposed != output_ids[position + 1 + accepted]:
                break
            accepted += 1
        position = min(position + 1 + accepted, len(output_ids) - 1)  # the target's own token follows the accepted ones
        steps += 1
    return ChainReplay(max(0, len(output_ids) - 1), steps)


def replay_accepted(accepted: Sequence[int]) -> ChainReplay:
    """Replay a chain by the number of accepted draft tokens of each output's row."""
    position, steps, last = 0, 0, len(accepted) - 1
    while position < last:
        position = min(position + 1 + accepted[position], last)
        steps += 1
    return ChainReplay(max(0, last), steps)


@torch.no_grad()
def measure(target: Target, heads: MedusaHeads, texts: Sequence[Text]) -> HeadsReport:
    """Compute every row once, apply every head to it, and replay. Raises HeadsError if there is nothing to measure."""
    num_heads = heads.shape.num_heads
    right, places = [0] * num_heads, [0] * num_heads
    agreed = num_tokens = tokens = steps = 0
    for batch in batches(texts):
        chosen = [texts[i] for i in batch]
        for text, rows in zip(chosen, written_rows(target, chosen), strict=True):
            best, proposals = _best(target, heads, rows)
            for head in range(num_heads):
                labels = text.output_ids[head + 1 :]
                places[head] += len(labels)
                right[head] += sum(p[head] == token for p, token in zip(proposals, labels, strict=False))
            agreed += sum(a == b for a, b in zip(best, text.output_ids, strict=True))
            chain = replay(text.output_ids, proposals)
            num_tokens, tokens, steps = num_tokens + len(best), tokens + chain.tokens, steps + chain.steps
    if not steps:
        raise HeadsError("the target generated at most one token after each prompt, so there is nothing to predict")
    shares = tuple(r / max(1, p) for r, p in zip(right, places, strict=True))
    return HeadsReport(len(texts), num_tokens, shares, tokens / steps, agreed / num_tokens)


def _best(target: Target, heads: MedusaHeads, rows: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    """The target's most likely token of each row, and the heads' draft tokens."""
    best: list[int] = []
    proposals: list[list[int]] = []
    for part in rows.split(max(1, MAX_LOGITS // (target.vocab_size * (heads.shape.num_heads + 1)))):
        best += target.logits(part).argmax(-1).tolist()
        proposals += heads.propose(part, target.logits, target.vocab_size).tolist()
    return best, proposals


def table(report: HeadsReport) -> str:
    """The report as a Markdown table."""
    lines = [f"{report.num_texts} held-out texts, {report.num_tokens:,} tokens", "", "| | measured |", "|---|---|"]
    lines += [f"| head {head}, {head + 2} positions ahead: top-1 | {p:.1%} |" for head, p in enumerate(report.top1)]
    lines.append(f"| tokens per step of the chain | {report.tokens_per_step:.3f} |")
    lines.append(f"| greedy agreement with the target | {report.greedy_agreement:.2%} |")
    return "\n".join(lines)


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
    measured = measure(target, MedusaHeads.of(saved).to(target.place.device), held_out)
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
    return measure(target, MedusaHeads.of(heads_file).to(target.place.device), written)


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

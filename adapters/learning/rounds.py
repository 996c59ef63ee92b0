"""One round of training per job: the new rows of a pair with as many older ones, then a replay of the newest texts.
A round has little time. The heads learn to choose among the frequent tokens of these texts, and the replay computes a
later head only where the earlier ones are right.

A pair's heads and their optimizer stay in memory between its rounds. Heads that a replay finds better than those in use
are written to the adapter store under a digest of their own.
"""

import hashlib
import json
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import structlog
import torch
from safetensors import safe_open

from lorikeet.adapters.errors import AdapterError, HeadsError
from lorikeet.adapters.formats import heads as served_heads
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.formats.heads import MedusaHeads, MedusaShape, expected_shapes
from lorikeet.adapters.formats.layout import Base, ServedLayout, served_file
from lorikeet.adapters.learning.base_head import BaseHead
from lorikeet.adapters.learning.rows import HeldOut, JobRows
from lorikeet.adapters.medusa import training
from lorikeet.adapters.medusa.texts import labels_of
from lorikeet.adapters.medusa.training import HeadsOptimizer, HeadsRecipe
from lorikeet.adapters.store import Store
from lorikeet.proto.digest import base_key
from lorikeet.proto.learning import Trained, TrainerSettings, TrainingJob

log = structlog.get_logger()

RECIPE = HeadsRecipe(num_heads=3, epochs=3, rows_per_step=128, lr=1e-2)
"""Training settings of one round. The dtype is float32 if bfloat16 products are slower."""
WIDTH_OF_LR = 256
"""Hidden size above which the learning rate falls as 1/H, as Adam's should (Yang et al. 2022, arXiv 2203.03466)."""
ROUND_S = 60.0
"""No training step starts later than this in a round. So heads are replayed and adopted even if the trainer gets little
of a processor, and the next round continues from there with newer rows."""
MAX_PAIRS = 8
"""Pairs whose heads stay in memory; others continue from the heads in use."""
PROPOSED_ROWS = 256
"""Rows that heads propose for at a time."""
UNDISTURBED = 0.9
"""Other work needs the processor if the thread that trains ran for less than this share of a step's time."""
BUSY_SHARE = 0.05
"""Maximum share of one processor that all training threads together take then."""
OWN_OUTPUT = "its adapter changes the output head: heads are not learned for it"


class Abandoned(Exception):
    """Nobody waits for the answer any more."""


class Throttle:
    """Sleeps after a computation that other work has interrupted. Idle priority is not enough: on the second
    hardware thread of a core, training slows down the first one.
    """

    def __init__(self) -> None:
        self._start()

    def wait(self) -> None:
        """Call this after each step of training, and each part of a replay."""
        wall, thread_s = time.monotonic() - self._wall, time.thread_time() - self._own
        if thread_s < UNDISTURBED * wall:
            time.sleep(max(0.0, (time.process_time() - self._all) / BUSY_SHARE - wall))
        self._start()

    def _start(self) -> None:
        self._wall, self._own, self._all = time.monotonic(), time.thread_time(), time.process_time()


@dataclass(frozen=True)
class _Facts:
    """What all rounds share."""

    head: BaseHead
    base: Base
    recipe: HeadsRecipe


class Rounds:
    """The rounds of one shard."""

    def __init__(self, settings: TrainerSettings, is_abandoned: Callable[[], bool]) -> None:
        self._settings, self._is_abandoned = settings, is_abandoned
        memory = mmap.mmap(settings.rows_fd, settings.layout.num_bytes, prot=mmap.PROT_READ)
        self._arrays = settings.layout.arrays(memoryview(memory))
        self._key = base_key(settings.model_path, settings.dtype)
        self._store = Store(settings.adapter_store, settings.store_bytes, self._key)
        self._facts: _Facts | None = None
        self._pairs: OrderedDict[int, HeadsOptimizer] = OrderedDict()
        self._random = np.random.default_rng(0)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))

    def prepare(self) -> None:
        """Load what all rounds share, ahead of the first. If that fails, a job tries again and its answer has the
        reason.
        """
        with suppress(AdapterError, HeadsError, OSError, ValueError, MemoryError):
            self._facts = self._load()

    def do(self, job: TrainingJob) -> Trained:
        """A job. Raises Abandoned."""
        wall, cpu = time.monotonic(), time.process_time()
        try:
            answer = self._do(job)
        except (AdapterError, HeadsError, OSError, ValueError) as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": "there is no memory for training"}
        seconds = {"seconds": time.monotonic() - wall, "cpu_seconds": time.process_time() - cpu}
        return Trained(job.pair, **answer, **seconds)  # type: ignore[arg-type]

    def _do(self, job: TrainingJob) -> dict[str, str | float | int]:
        facts = self._facts = self._facts or self._load()
        if self._changes_output(job.adapter_digest, facts.head.name):
            raise HeadsError(OWN_OUTPUT)
        optimizer = self._optimizer(job, facts)
        rows = JobRows(self._arrays, job, RECIPE.num_heads)
        if not len(rows.candidates) or not rows.num_held_out:
            raise HeadsError("there are too few texts: some are held out of training")
        optimizer.output = facts.head.logits_of(rows.candidates), len(rows.candidates)
        throttle = Throttle()
        self._train(optimizer, rows, throttle)
        earlier = 1.0
        if job.heads_digest:
            used = self._served(job.heads_digest, facts.head)
            earlier = _tokens_per_step(used, rows.held_out, facts.head, throttle)
        tokens_per_step = _tokens_per_step(
            _rounded(optimizer.heads, facts.base.dtype), rows.held_out, facts.head, throttle
        )
        digest = self._write(optimizer.heads, facts.base) if tokens_per_step >= job.min_gain * earlier else ""
        return {
            "heads_digest": digest,
            "tokens_per_step": tokens_per_step,
            "tokens_per_step_before": earlier,
            "num_rows": len(rows.indices),
        }

    def _load(self) -> _Facts:
        settings, (of_config, of_weights, dtype) = self._settings, self._key
        skeleton = Skeleton(settings.model_path, settings.trust_remote_code)
        values = BaseValues(skeleton)
        base = Base(of_config, of_weights, getattr(torch, dtype), frozenset(), values)
        bf16 = _has_fast_bf16()
        head = BaseHead(skeleton, values, torch.bfloat16 if bf16 else torch.float32)
        lr = RECIPE.lr * min(1.0, WIDTH_OF_LR / head.hidden_size)
        return _Facts(head, base, replace(RECIPE, bf16=bf16, lr=lr))

    def _optimizer(self, job: TrainingJob, facts: _Facts) -> HeadsOptimizer:
        """The pair's heads as they are, else those in use if they have the recipe's shape, else untrained ones."""
        optimizer, head = self._pairs.pop(job.pair, None), facts.head
        if optimizer is None:
            shape = MedusaShape(RECIPE.num_heads, RECIPE.num_layers, head.hidden_size)
            heads = MedusaHeads(shape)
            if job.heads_digest and (used := self._served(job.heads_digest, head)).shape == shape:
                heads = used
            optimizer = HeadsOptimizer(heads, facts.recipe, head.logits, head.vocab_size)
        self._pairs[job.pair] = optimizer
        while len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return optimizer

    def _train(self, optimizer: HeadsOptimizer, rows: JobRows, throttle: Throttle) -> None:
        recipe, started = optimizer.recipe, time.monotonic()
        batches = [batch for _ in range(recipe.epochs) for batch in rows.batches(recipe.rows_per_step, self._random)]
        for step, batch in enumerate(batches):
            if self._is_abandoned():
                raise Abandoned
            progress = max(step / len(batches), (time.monotonic() - started) / ROUND_S)
            if progress >= 1:
                break
            optimizer.take(*rows.take(batch), recipe.lr_at(round(1000 * progress), 1000))
            throttle.wait()

    def _write(self, heads: MedusaHeads, base: Base) -> str:
        """Store heads; returns their digest."""
        tensors = heads.tensors(torch.float32)
        hashed = hashlib.sha256(repr(self._key).encode())
        for name in sorted(tensors):
            hashed.update(tensors[name].contiguous().numpy().tobytes())
        digest = hashed.hexdigest()
        parsed = served_heads.ParsedHeads(heads.shape, tensors, ())
        laid_out = served_heads.lay_out_heads(parsed, 0, base.dtype)
        file = served_file(ServedLayout(laid_out, {}, served_heads.heads_metadata(heads.shape)), digest, base)
        self._store.add(digest, file.num_bytes, file.write)
        return digest

    def _served(self, digest: str, head: BaseHead) -> MedusaHeads:
        """Heads of the store. Raises OSError or HeadsError."""
        path = self._store.path(digest)
        try:
            with safe_open(path, framework="pt") as file:
                return _from_served(file, head)
        except FileNotFoundError:
            raise HeadsError("the heads in use are no longer in the adapter store") from None

    def _changes_output(self, digest: str, name: str) -> bool:
        """Whether an adapter changes the output head, so that its logits are not those of the base's."""
        if not digest:
            return False
        try:
            with safe_open(self._store.path(digest), framework="pt") as file:
                return name in json.loads((file.metadata() or {}).get("modules", "{}"))
        except FileNotFoundError:
            raise HeadsError("the adapter is no longer in the adapter store") from None


def _has_fast_bf16() -> bool:
    """Whether products in bfloat16 are not slower here than in float32."""
    seconds = {dtype: _product_seconds(dtype) for dtype in (torch.bfloat16, torch.float32)}
    return seconds[torch.bfloat16] <= seconds[torch.float32]


def _product_seconds(dtype: torch.dtype) -> float:
    a = torch.ones(256, 256, dtype=dtype)
    durations = []
    for _ in range(3):
        started = time.thread_time()
        a @ a
        durations.append(time.thread_time() - started)
    return min(durations)


def _from_served(file: "safe_open", head: BaseHead) -> MedusaHeads:
    facts = json.loads((file.metadata() or {}).get("heads", "{}"))
    count, layers = int(facts["count"]), int(facts["layers"])
    shape = MedusaShape(count, layers, head.hidden_size, None if int(facts["version"]) == 2 else head.vocab_size)
    heads, tensors = MedusaHeads(shape), {}
    for name in expected_shapes(shape):
        number, block, *part = name.split(".")
        middle = f".{block}" if layers > 1 else ""
        served = f"heads.{number}{middle}.{part[-1]}" if part[0] == "linear" else f"heads.{number}.output"
        tensors[name] = file.get_tensor(served)
    heads.load(tensors)
    return heads


def _rounded(heads: MedusaHeads, dtype: torch.dtype) -> MedusaHeads:
    """The heads as they are served."""
    rounded = MedusaHeads(heads.shape)
    rounded.load(heads.tensors(dtype))
    return rounded


@torch.no_grad()
def _tokens_per_step(heads: MedusaHeads, held_out: HeldOut, head: BaseHead, throttle: Throttle) -> float:
    """A replay of the held-out texts."""
    # [rows] number of drafts that would be accepted
    accepted = torch.zeros(len(held_out.rows), dtype=torch.long)
    remaining = torch.cat([torch.arange(len(ids) - 1, -1, -1) for ids in held_out.output_ids])
    output_ids = torch.tensor([token_id for ids in held_out.output_ids for token_id in ids])
    # [rows, heads]
    labels = labels_of(output_ids, remaining, heads.shape.num_heads)
    # [R] indices of rows of which every earlier head was right
    right = torch.arange(len(accepted))
    for number in range(heads.shape.num_heads):
        proposed = []
        for part in right.split(PROPOSED_ROWS):
            proposed.append(heads.propose_one(number, held_out.rows[part], head.logits, head.vocab_size))
            throttle.wait()
        right = right[torch.cat(proposed) == labels[right, number]]
        if not len(right):
            break
        accepted[right] += 1
    chains = [training.replay_accepted(part.tolist()) for part in accepted.split(list(map(len, held_out.output_ids)))]
    return sum(chain.tokens for chain in chains) / max(1, sum(chain.steps for chain in chains))

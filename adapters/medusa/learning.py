"""The trainer of Medusa heads that a shard starts: `python -m lorikeet.adapters.medusa.learning`.

A job is one round of training on the new rows of a pair and as many older ones, then a replay of the newest texts. A
round has little time: the heads learn to choose among the frequent tokens of these texts, and the replay computes a
later head only if the earlier ones are right. A pair's heads and their optimizer stay in memory between its rounds.
Heads that a replay finds better than those in use are written to the adapter store under a digest of their own.
"""

import hashlib
import json
import mmap
import os
import signal
import sys
import time
import timeit
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

from lorikeet.adapters.errors import AdapterError, HeadsError
from lorikeet.adapters.formats.base_model import BaseValues, Skeleton
from lorikeet.adapters.formats.heads import (
    HeadsFile,
    MedusaHeads,
    MedusaShape,
    ParsedHeads,
    heads_metadata,
    lay_out_heads,
    served_names,
)
from lorikeet.adapters.formats.layout import Base, ServedLayout, served_file
from lorikeet.adapters.medusa.target import transforms
from lorikeet.adapters.medusa.texts import NOTHING, labels_of
from lorikeet.adapters.medusa.training import HeadsOptimizer, HeadsRecipe, digest, replay_accepted
from lorikeet.adapters.store import Store
from lorikeet.proto import logs
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.digest import base_key
from lorikeet.proto.learning import BLOCK_ROWS, Pair, RowsLayout, Trained, TrainerSettings, TrainingJob, row_indices
from lorikeet.proto.process import signal_at_parent_death

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
HELD_OUT_SHARE, MAX_HELD_OUT = 0.1, 2048
"""The newest rows that are not trained on: this share, at most so many."""
CANDIDATE_SHARE, MAX_CANDIDATES = 0.99, 8192
"""The most frequent labels that make up this share of all, at most so many, are the candidates."""

Indices = npt.NDArray[np.int64]


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


class BaseHead:
    """The base's output head, read from its files without the rest of the base, and what follows it in the model."""

    def __init__(self, skeleton: Skeleton, values: BaseValues, dtype: torch.dtype) -> None:
        """Raises HeadsError or NotServed for a base whose output head cannot be read."""
        with skeleton.borrowed() as network:
            output = network.get_output_embeddings()
            if output is None:
                raise HeadsError("the base has no output head, which Medusa heads need")
            self.name = next(name for name, module in network.named_modules() if module is output)
            has_bias = getattr(output, "bias", None) is not None
        # [V, H]
        self._weight = values[f"{self.name}.weight"].to(dtype)
        # [V]
        self._bias = values[f"{self.name}.bias"].to(dtype) if has_bias else None
        self.vocab_size, self.hidden_size = self._weight.shape
        *_, self._after = transforms(skeleton.config.get_text_config())

    def logits(self, rows: Tensor) -> Tensor:
        """Hidden rows [S, H] → logits [S, V]."""
        return self._after(linear(rows.to(self._weight.dtype), self._weight, self._bias))

    def logits_of(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """token_ids: [C]. Hidden rows [S, H] → logits [S, C] of these tokens."""
        weight, bias = self._weight[token_ids], None if self._bias is None else self._bias[token_ids]
        return lambda rows: self._after(linear(rows.to(weight.dtype), weight, bias))


@dataclass(frozen=True)
class HeldOut:
    """The newest texts."""

    # [rows, H] bfloat16
    rows: Tensor
    output_ids: list[list[int]]
    """Output token ids of each text, in the order of the rows."""


class JobRows:
    """The rows of a job, text after text, as they lie in the shard's memory, which goes on to change: a block that it
    has taken for other rows since the job was sent is left out.
    """

    def __init__(self, memory: memoryview, layout: RowsLayout, job: TrainingJob, num_heads: int) -> None:
        self._versions_now, self._rows = layout.arrays(memory)
        # [blocks] version of each block of the job
        self._versions = np.full(layout.num_blocks, -1)
        for block in job.blocks:
            self._versions[block.number] = block.version
        indices = row_indices(job.blocks)
        texts, token_ids = self._rows["text"][indices], self._rows["token_id"][indices].astype(np.int64)
        is_current = self._is_current(indices)
        indices, texts, token_ids = indices[is_current], texts[is_current], token_ids[is_current]
        newest = _newest(texts, min(int(HELD_OUT_SHARE * len(texts)), MAX_HELD_OUT))
        order = np.argsort(texts, kind="stable")
        is_newest = np.isin(texts[order], newest)
        self.held_out = self._held_out(indices, texts, token_ids, order[is_newest])
        order = order[~is_newest]
        # [n] index of each row, and whether it was not trained on before; so many were held out last time
        self.indices, self._is_new = indices[order], len(texts) - order <= job.num_new + self.num_held_out
        # [n, heads]
        remaining = torch.from_numpy(_remaining(texts[order]))
        # [C], [n, heads] index of each label among these candidates
        self.candidates, self.labels = _candidates(labels_of(torch.from_numpy(token_ids[order]), remaining, num_heads))

    @property
    def num_held_out(self) -> int:
        return len(self.held_out.rows)

    def batches(self, size: int, random: np.random.Generator) -> list[Indices]:
        """One pass over the new rows, in a random order, with as many others."""
        new, old = np.flatnonzero(self._is_new), np.flatnonzero(~self._is_new)
        drawn = random.choice(old, min(len(new), len(old)), replace=False)
        chosen = random.permutation(np.concatenate([new, drawn]))
        return [chosen[first : first + size] for first in range(0, len(chosen), size)]

    def take(self, batch: Indices) -> tuple[Tensor, Tensor]:
        """[S, H] rows and [S, heads] labels; nothing is to be learned from rows that have gone."""
        indices = self.indices[batch]
        rows = self._hidden(indices)
        labels = self.labels[torch.from_numpy(batch)]
        labels[torch.from_numpy(~self._is_current(indices))] = NOTHING
        return rows, labels

    def _hidden(self, indices: Indices) -> Tensor:
        """[S, H] bfloat16, a copy."""
        return torch.from_numpy(self._rows["hidden"][indices].view(np.int16)).view(torch.bfloat16)

    def _is_current(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """Read this after the rows themselves."""
        blocks = indices // BLOCK_ROWS
        return self._versions_now[blocks] == self._versions[blocks]

    def _held_out(self, indices: Indices, texts: Indices, token_ids: Indices, chosen: Indices) -> HeldOut:
        rows = self._hidden(indices[chosen])
        is_current = self._is_current(indices[chosen])
        rows, chosen = rows[torch.from_numpy(is_current)], chosen[is_current]
        starts = np.flatnonzero(np.diff(texts[chosen])) + 1
        return HeldOut(rows, [part.tolist() for part in np.split(token_ids[chosen], starts)] if len(chosen) else [])


def _newest(texts: Indices, num_rows: int) -> Indices:
    """The texts whose last rows are the newest, as many as have `num_rows` rows."""
    numbers, first_from_end, counts = np.unique(texts[::-1], return_index=True, return_counts=True)
    order = np.argsort(first_from_end)
    num_taken = int(np.searchsorted(np.cumsum(counts[order]), num_rows)) + 1
    return numbers[order[: min(num_taken, len(order) - 1)]]


def _remaining(texts: Indices) -> Indices:
    """texts: [n], rows of one text together. Returns [n] rows of the same text after each."""
    ends = np.append(np.flatnonzero(np.diff(texts)), len(texts) - 1)
    return np.repeat(ends, np.diff(np.append(-1, ends))) - np.arange(len(texts)) if len(texts) else texts


def _candidates(labels: Tensor) -> tuple[Tensor, Tensor]:
    """labels: [n, heads]. Returns [C] token ids, the most frequent first, and [n, heads] indices into them; nothing is
    learned from a rarer label. Most of a step's time is the product with the output head, and texts of one pair use a
    small part of a large vocabulary (a softmax over candidates: Jean et al. 2015, arXiv 1412.2007).
    """
    is_label = labels != NOTHING
    if not is_label.any():
        return torch.empty(0, dtype=torch.long), labels
    token_ids, inverse, counts = labels[is_label].unique(return_inverse=True, return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    counts_before = counts[order].cumsum(0) - counts[order]
    num_candidates = min(int((counts_before < CANDIDATE_SHARE * counts.sum()).sum()), MAX_CANDIDATES)
    places = torch.full_like(token_ids, NOTHING)
    places[order[:num_candidates]] = torch.arange(num_candidates)
    places_of_labels = labels.clone()
    places_of_labels[is_label] = places[inverse]
    return token_ids[order[:num_candidates]], places_of_labels


class Rounds:
    """The rounds of one shard."""

    def __init__(self, settings: TrainerSettings, is_abandoned: Callable[[], bool]) -> None:
        self._settings, self._is_abandoned = settings, is_abandoned
        self._memory = memoryview(mmap.mmap(settings.rows_fd, settings.layout.num_bytes, prot=mmap.PROT_READ))
        self._key = base_key(settings.model_path, settings.dtype)
        self._store = Store(settings.adapter_store, settings.store_bytes, self._key)
        self._pairs: OrderedDict[Pair, HeadsOptimizer] = OrderedDict()
        self._random = np.random.default_rng(0)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))

    def prepare(self) -> None:
        """Load the base's head, ahead of the first job. If that fails, a job tries again, and answers the reason."""
        with suppress(AdapterError, HeadsError, OSError, ValueError, MemoryError):
            self._shared  # noqa: B018

    @cached_property
    def _shared(self) -> tuple[BaseHead, Base, HeadsRecipe]:
        """What all rounds use."""
        of_config, of_weights, dtype = self._key
        skeleton = Skeleton(self._settings.model_path, self._settings.trust_remote_code)
        values = BaseValues(skeleton)
        base = Base(of_config, of_weights, getattr(torch, dtype), frozenset(), values)
        bf16 = _has_fast_bf16()
        head = BaseHead(skeleton, values, torch.bfloat16 if bf16 else torch.float32)
        return head, base, replace(RECIPE, bf16=bf16, lr=RECIPE.lr * min(1.0, WIDTH_OF_LR / head.hidden_size))

    def do(self, job: TrainingJob) -> Trained:
        """A job. Raises Abandoned."""
        wall, cpu, decision = time.monotonic(), time.process_time(), pb.LearningDecision(decision="failed")
        try:
            self._do(job, decision)
        except (AdapterError, HeadsError, OSError, ValueError) as error:
            decision.reason = str(error)
        except MemoryError:
            decision.reason = "there is no memory for training"
        decision.seconds = time.monotonic() - wall
        return Trained(job.pair, decision, time.process_time() - cpu)

    def _do(self, job: TrainingJob, decision: pb.LearningDecision) -> None:
        """Train heads, compare them with those in use, and complete the decision."""
        (head, base, _), adapter_digest = self._shared, job.pair[1]
        if adapter_digest and head.name in self._modules(adapter_digest):
            raise HeadsError("its adapter changes the output head: heads are not learned for it")
        optimizer = self._optimizer(job)
        rows = JobRows(self._memory, self._settings.layout, job, RECIPE.num_heads)
        if not len(rows.candidates) or not rows.num_held_out:
            raise HeadsError("there are too few texts: some are held out of training")
        optimizer.output = head.logits_of(rows.candidates), len(rows.candidates)
        throttle = Throttle()
        self._train(optimizer, rows, throttle)
        earlier = 1.0
        if job.heads_digest:
            earlier = _tokens_per_step(self._served(job.heads_digest), rows.held_out, head, throttle)
        as_served = MedusaHeads.of(HeadsFile(optimizer.heads.shape, optimizer.heads.tensors(base.dtype)))
        tokens_per_step = _tokens_per_step(as_served, rows.held_out, head, throttle)
        decision.tokens_per_step, decision.tokens_per_step_before = tokens_per_step, earlier
        decision.num_rows = len(rows.indices)
        if tokens_per_step >= job.min_gain * earlier:
            decision.heads_digest = self._write(optimizer.heads)
            decision.decision, decision.reason = "adopted", "more tokens per step in a replay of the newest outputs"
        else:
            decision.decision, decision.reason = "rejected", "no gain in a replay of the newest outputs"

    def _optimizer(self, job: TrainingJob) -> HeadsOptimizer:
        """The pair's heads as they are, else those in use if they have the recipe's shape, else untrained ones."""
        optimizer, (head, _, recipe) = self._pairs.pop(job.pair, None), self._shared
        if optimizer is None:
            shape = MedusaShape(RECIPE.num_heads, RECIPE.num_layers, head.hidden_size)
            heads = self._served(job.heads_digest) if job.heads_digest else MedusaHeads(shape)
            heads = heads if heads.shape == shape else MedusaHeads(shape)
            optimizer = HeadsOptimizer(heads, recipe, head.logits, head.vocab_size)
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

    def _write(self, heads: MedusaHeads) -> str:
        """Store heads; returns their digest."""
        _, base, _ = self._shared
        tensors = heads.tensors(torch.float32)
        name = hashlib.sha256(f"{self._key} {digest(HeadsFile(heads.shape, tensors))}".encode()).hexdigest()
        laid_out = lay_out_heads(ParsedHeads(heads.shape, tensors, ()), 0, base.dtype)
        file = served_file(ServedLayout(laid_out, {}, heads_metadata(heads.shape)), name, base)
        self._store.add(name, file.num_bytes, file.write)
        return name

    def _served(self, name: str) -> MedusaHeads:
        """Heads of the store. Raises OSError or HeadsError."""
        head, _, _ = self._shared
        with self._stored(name, "the heads in use are") as file:
            facts = json.loads(file.metadata()["heads"])
            vocab_size = None if facts["version"] == 2 else head.vocab_size
            heads = MedusaHeads(MedusaShape(facts["count"], facts["layers"], head.hidden_size, vocab_size))
            heads.load({own: file.get_tensor(served) for own, served in served_names(heads.shape).items()})
        return heads

    def _modules(self, name: str) -> dict[str, Any]:
        """The modules that an adapter of the store changes."""
        with self._stored(name, "the adapter is") as file:
            modules: dict[str, Any] = json.loads((file.metadata() or {}).get("modules", "{}"))
        return modules

    def _stored(self, name: str, what: str) -> Any:
        try:
            return safe_open(self._store.path(name), framework="pt")
        except FileNotFoundError:
            raise HeadsError(f"{what} no longer in the adapter store") from None


def _has_fast_bf16() -> bool:
    """Whether products in bfloat16 are not slower here than in float32."""

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(256, 256, dtype=dtype)
        return min(timeit.repeat(lambda: a @ a, timer=time.thread_time, number=1, repeat=3))

    return seconds(torch.bfloat16) <= seconds(torch.float32)


@torch.no_grad()
def _tokens_per_step(heads: MedusaHeads, held_out: HeldOut, head: BaseHead, throttle: Throttle) -> float:
    """A replay of the held-out texts."""
    lengths = [len(ids) for ids in held_out.output_ids]
    # [rows] number of drafts that would be accepted
    accepted = torch.zeros(len(held_out.rows), dtype=torch.long)
    remaining = torch.cat([torch.arange(length - 1, -1, -1) for length in lengths])
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
    chains = [replay_accepted(part.tolist()) for part in accepted.split(lengths)]
    return sum(chain.tokens for chain in chains) / max(1, sum(chain.steps for chain in chains))


def main() -> int:
    """Run the process: settings and jobs arrive on the socket of the first argument. It ends with the shard."""
    signal_at_parent_death()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the shard ends it
    connection = Connection(int(sys.argv[1]))
    settings: TrainerSettings = connection.recv()
    logs.configure(settings.json_output, settings.log_level, "trainer")
    # while a job runs only the shard's end can make the socket readable
    rounds = Rounds(settings, connection.poll)
    rounds.prepare()
    with suppress(Abandoned, EOFError, ConnectionError):
        while True:
            connection.send(rounds.do(connection.recv()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

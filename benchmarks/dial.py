"""A draft model with a dial, and a tiny pair of models with it: recorded texts, and at each of their positions a token
that is right with a chosen probability. `benchmarks.dialled` says what for. Knows the shard's models and requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.dialled import AT_ONCE, PROMPT, SEED, TEXT, TINY
from benchmarks.harness import Harness, Run, Wanted, random_llama
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import Model, load_model
from lorikeet.shard.scheduler.request import Request
from lorikeet.shard.scheduler.speculation.types import Method, Schedule, Speculation

FORCED = 1e9
"""A logit that no other reaches."""


@dataclass
class Dial:
    """What the draft model is to be right about."""

    chance: float
    recorded: Sequence[Sequence[int]]
    """By number of text, prompt and output."""
    round: int = 0
    """Another one, other positions."""
    _live: list[tuple[Request, npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = field(default_factory=list)

    def began(self, number: int, request: Request) -> None:
        """`request` writes recorded text `number`, counted round and round."""
        ids = np.asarray(self.recorded[number % len(self.recorded)], np.int64)
        self._live.append((request, ids, self.right(number, len(ids))))

    def right(self, number: int, length: int) -> npt.NDArray[np.bool_]:
        """At which positions of text `number` the draft model is right."""
        draw: npt.NDArray[np.float64] = np.random.default_rng([SEED, self.round, number]).random(length)
        return draw < self.chance

    def set(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        """logits: [S, V], of the first S segments of a pass of the draft model; changed in place."""
        by_pages = self._by_pages()
        forced: list[tuple[int, int]] = []
        forbidden: list[tuple[int, int]] = []
        for row, segment in enumerate(inputs.segments[: logits.shape[0]]):
            ids, right = by_pages.get(id(segment.page_ids), ((), ()))
            if segment.kv_len < len(ids):
                (forced if right[segment.kv_len] else forbidden).append((row, int(ids[segment.kv_len])))
        _put(logits, forced, FORCED)
        _put(logits, forbidden, -torch.inf)

    def force(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        """Let the target write the recorded texts. logits: [S + E, V], of a pass of it; changed in place."""
        by_pages = self._by_pages()
        forced: list[tuple[int, int]] = []
        for row, at in enumerate(inputs.host_rows):
            place = int(inputs.first_rows.searchsorted(at, side="right")) - 1
            segment = inputs.segments[place]
            ids, _ = by_pages.get(id(segment.page_ids), ((), ()))
            following = segment.start + at - int(inputs.first_rows[place]) + 1
            if following < len(ids):
                forced.append((row, int(ids[following])))
        _put(logits, forced, FORCED)

    def _by_pages(self) -> dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
        """What is recorded and where a draft is right, by the identity of a request's list of pages."""
        self._live = [each for each in self._live if not each[0].finish_reason]
        return {id(request.page_ids): (ids, right) for request, ids, right in self._live}


def _put(logits: torch.Tensor, places: Sequence[tuple[int, int]], value: float) -> None:
    """logits: [rows, V]; places: (row, token). The host does not wait for the device."""
    if places:
        rows, tokens = to_device(torch.tensor(places).T.contiguous(), logits.device)
        logits.index_put_((rows, tokens), to_device(torch.tensor(value), logits.device))


class DialledModel(Model):
    """A loaded draft model whose logits a dial changes."""

    dial: Dial | None = None
    is_target: bool = False
    """Whether it writes what is recorded; else it is right about it where the dial says so."""

    @classmethod
    def of(cls, model: Model, is_target: bool = False) -> Self:
        dialled = object.__new__(cls)
        dialled.__dict__.update(model.__dict__)
        dialled.is_target = is_target
        return dialled

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """[S, V]"""
        logits = super().forward()
        if self.dial is not None:
            (self.dial.force if self.is_target else self.dial.set)(self.inputs, logits)
        return logits


class Pair:
    """A tiny target, its recorded texts, and a tiny draft model with a dial."""

    def __init__(self, num_texts: int, text: int = TEXT) -> None:
        torch.set_num_threads(1)  # matrices so small are not worth a second one
        target = random_llama("dialled-target", SEED, 8.0, **TINY)
        other = random_llama("dialled-draft", SEED + 1, 8.0, **TINY)
        config = ShardConfig(
            "target", str(target), "unix:/dev/null", dtype="float32", max_total_tokens=2048, max_running=AT_ONCE,
            cpu_memory=2**29, prefix_caching=False, speculation_max_batch_size=AT_ONCE,
        )  # fmt: skip
        draft = ShardConfig("draft", str(other), "unix:/dev/null", dtype="float32")
        self.draft = DialledModel.of(load_model(draft))
        self._harness = Harness(config, load_model(config), self.draft)
        self._text = text
        choice = np.random.default_rng(SEED)
        self._prompts = choice.integers(1, TINY["vocab_size"], (num_texts, PROMPT)).tolist()
        runs = self._harness.run([Wanted(prompt, text) for prompt in self._prompts])
        self.recorded = [[*run.wanted.prompt_ids, *run.token_ids] for run in runs]

    def run(self, chance: float, width: int, num_texts: int, round: int) -> list[Run]:
        """So many texts, the recorded ones over and over, with a draft that is right in other places each time."""
        how = Speculation(Method.DRAFT, width, schedule=Schedule.CONSTANT)
        dial = self.draft.dial = Dial(chance, self.recorded, round)
        wanted = [Wanted(self._prompts[i % len(self._prompts)], self._text, how) for i in range(num_texts)]
        runs = self._harness.run(wanted, dial.began)
        self.draft.dial = None
        for number, run in enumerate(runs):
            if [*run.wanted.prompt_ids, *run.token_ids] != self.recorded[number % len(self.recorded)]:
                raise RuntimeError(f"text {number} is not what was written without guessing")
        return runs

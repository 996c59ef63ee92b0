"""An engine in this process, without router and wire: requests in, what every step gave them out. And the random models
that it runs.

Knows a shard's seams: configuration, models, inbox, outbox. Knows no guess and no figure.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.models import MODELS
from shard.build import build_engine
from shard.config import ShardConfig
from shard.inbox import Commands, Inbox, StreamOpened
from shard.model import Model
from shard.outbox import Outbox, Output
from shard.request import NO_SPECULATION, Request, SamplingParams, Speculation
from shard.speculation.pacer import Pacer

EPOCH = 1


@dataclass(frozen=True)
class Wanted:
    """One request."""

    prompt_ids: Sequence[int]
    num_tokens: int
    speculation: Speculation = NO_SPECULATION
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Gave:
    """What one step gave one request."""

    token_ids: Sequence[int]
    num_drafted: int
    num_accepted: int
    at: float
    """time.perf_counter() when it was known."""


@dataclass
class Run:
    """What became of one request."""

    wanted: Wanted
    steps: list[Gave] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for gave in self.steps for token_id in gave.token_ids]


class Harness:
    """An engine with nobody else in it."""

    def __init__(self, config: ShardConfig, model: Model, draft_model: Model | None = None) -> None:
        self._inbox, self._outbox = Inbox(), Outbox()
        self._engine = build_engine(config, model, self._inbox, self._outbox, draft_model)
        self._engine.warm_up()
        self._outbox.open(EPOCH, wake=lambda: None)
        self._inbox.put(StreamOpened(EPOCH))
        self._num_made = 0
        self._at_once = config.max_running
        self._pacers: dict[str, Pacer] = {}

    def learn_as(self, name: str) -> None:
        """From now on schedules know what they learnt under that name alone."""
        proposer = self._engine.scheduler.proposer
        assert proposer is not None
        proposer.pacer = self._pacers.setdefault(name, Pacer(proposer.guessers))

    def run(
        self, wanted: Sequence[Wanted], began: Callable[[int, Request], None] = lambda number, request: None
    ) -> list[Run]:
        """Run all, as many at once as may, and return them in order. `began` hears of each request as it is made."""
        runs = [Run(each) for each in wanted]
        first, self._num_made = self._num_made, self._num_made + len(wanted)
        fresh, num_open, num_ended = self._requests(wanted, first, began), 0, 0
        while num_ended < len(wanted):
            if more := list(islice(fresh, self._at_once - num_open)):
                self._inbox.put(Commands(EPOCH, submits=list(more)))
                num_open += len(more)
            self._engine.step()
            for output in self._outbox.take(EPOCH).outputs:
                ended = self._note(runs[output.key[1] - first], output)
                num_ended, num_open = num_ended + ended, num_open - ended
        self._engine.scheduler.check()
        return runs

    @staticmethod
    def _requests(wanted: Sequence[Wanted], first: int, began: Callable[[int, Request], None]) -> Iterator[Request]:
        for number, each in enumerate(wanted):
            prompt = list(each.prompt_ids)
            request = Request((EPOCH, first + number), prompt, len(prompt), each.num_tokens, each.sampling)
            request.speculation = each.speculation
            began(number, request)
            yield request

    @staticmethod
    def _note(run: Run, output: Output) -> bool:
        """Whether the request has ended with this."""
        if output.error:
            raise RuntimeError(output.error)
        if output.token_ids:
            drafted = sum(output.num_drafted)
            run.steps.append(Gave(output.token_ids, drafted, output.num_accepted, time.perf_counter()))
        return bool(output.finish_reason)


def random_llama(name: str, seed: int, spread: float = 1.0, **shape: int) -> Path:
    """Folder of a random Llama, without a tokenizer; made once. Matrices are `spread` times what transformers draws."""
    folder = MODELS / name
    told: Mapping[str, object] = {"seed": seed, "spread": spread, **shape}
    note = folder / "done.json"
    if note.exists() and json.loads(note.read_text()) == told:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = LlamaConfig(**shape, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(spread)
    model.to(torch.bfloat16).save_pretrained(folder)
    note.write_text(json.dumps(told))
    return folder

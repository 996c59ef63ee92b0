"""An engine with the demo model that learns heads, whose trainer runs in this process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorikeet.adapters.medusa.learning import Rounds
from lorikeet.proto.learning import Trained, TrainerSettings, TrainingJob
from lorikeet.proto.params import Method, SamplingParams, Schedule, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.engine.engine import Engine
from lorikeet.shard.grpc.streams import Commands, Inbox, LearningAsked, Outbox, Output, StreamOpened
from lorikeet.shard.learning.learning import Learning, Rings, Trainer
from lorikeet.shard.model import Model
from lorikeet.shard.requests.request import Request
from lorikeet.shard.startup.build import build_engine
from tests.shard.rig import make_request

BASE = Path(__file__).parents[3] / "demo/base"
HEADS = Speculation(Method.AUTO, 0, 255, Schedule.CONSTANT)
PROMPT_IDS = [[10 + 3 * number + at for at in range(6)] for number in range(12)]


class DirectTrainer(Trainer):
    """Does its jobs when they are sent; the answer arrives like that of a process."""

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__(settings)
        self.rounds = Rounds(settings, lambda: False)
        self.jobs: list[TrainingJob] = []
        self._result: Trained | None = None

    def train(self, job: TrainingJob) -> None:
        self.jobs.append(job)
        with ThreadPoolExecutor(1) as pool:  # the step loop's thread cannot compute gradients
            self._result = pool.submit(self.rounds.do, job).result()

    def answer(self) -> Trained | None:
        answer, self._result = self._result, None
        return answer

    def stop(self) -> None:
        self._result = None
        self.rounds = Rounds(self._settings, lambda: False)


@dataclass
class Learner:
    """An engine, and the outputs of its requests."""

    engine: Engine
    inbox: Inbox
    outbox: Outbox
    outputs: dict[int, Output] = field(default_factory=dict)
    num_made: int = 0

    @property
    def learning(self) -> Learning:
        assert isinstance(self.engine.learning, Learning)
        return self.engine.learning

    def submit(self, prompts: Sequence[list[int]], num_tokens: int = 40, **values: Any) -> list[int]:
        """Ask for texts; returns the numbers of the requests."""
        numbers = list(range(self.num_made, self.num_made + len(prompts)))
        self.num_made += len(prompts)
        values = {"speculation": HEADS, "learner": "one", **values}
        requests = [make_request(n, ids, num_tokens, **values) for n, ids in zip(numbers, prompts, strict=True)]
        self.inbox.put(Commands(1, submits=list[Any](requests)))
        return numbers

    def run(self, prompts: Sequence[list[int]], num_tokens: int = 40, **values: Any) -> list[Output]:
        """The outputs of requests that run together."""
        numbers = self.submit(prompts, num_tokens, **values)
        self.turn(lambda: all(n in self.outputs and self.outputs[n].finish_reason for n in numbers))
        return [self.outputs[number] for number in numbers]

    def turn(self, is_done: Callable[[], bool]) -> None:
        """Step until something is the case."""
        for _ in range(5000):
            if is_done():
                return
            self.engine.step()
            if self.engine.scheduler.is_idle or not self.engine.scheduler.running:
                self.inbox.wait(0.01)
            for output in self.outbox.take(1).request_outputs():
                assert not output.error, output.error
                earlier = self.outputs.setdefault(output.key[1], output)
                if earlier is not output:
                    earlier.merge(output)
        raise AssertionError("it does not end")

    def ask(self, purge: bool = False) -> Any:
        """What `/admin/learning` would show."""
        asked = LearningAsked(purge)
        self.inbox.put(asked)
        self.turn(asked.answer.done)
        return asked.answer.result()

    def end(self) -> None:
        self.turn(lambda: self.engine.scheduler.is_idle)
        self.engine.scheduler.check()
        check_blocks(self.learning.rings)


def check_blocks(rings: Rings) -> None:
    """Every block is free or belongs to one ring."""
    used = [block.number for ring in rings._rings.values() for block in ring]
    assert sorted([*rings._free, *used]) == list(range(rings.layout.num_blocks))


def make(model: Model, config: ShardConfig) -> Learner:
    """An engine over a loaded model."""
    inbox, outbox = Inbox(), Outbox()
    engine = build_engine(config, model, inbox, outbox)
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    return Learner(engine, inbox, outbox)


def config_of(store: Path, **settings: Any) -> ShardConfig:
    common: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 256, "threads": 1, "history_memory": 0}
    common |= {"adapter_store": str(store), "max_active_adapters": 4, "learning_memory": 4 << 20, "num_pages": 200}
    return ShardConfig("demo", str(BASE), "unix:/dev/null", **common, **settings)


def sampled(number: int) -> SamplingParams:
    return SamplingParams(do_sample=True, temperature=0.7, seed=number)


def tokens_per_step(outputs: Sequence[Output]) -> float:
    return sum(len(output.token_ids) for output in outputs) / sum(output.step_ends.count(1) for output in outputs)


__all__ = ["Request"]

"""When one generation loaded its adapter, waited, ran and got tokens. Kept only for requests that are traced."""

import time
from dataclasses import dataclass, field

from lorikeet.proto import shard_pb2 as pb

MAX_STEPS = 1024
"""Maximum recorded steps of one period; the output of later steps is only counted."""


@dataclass(slots=True)
class StepEvent:
    """One message of a shard about the request: the output of a step, or of several while the stream was slow."""

    at: float
    """time.monotonic()."""
    number: int
    """Number of the last of these steps, on its shard."""
    num_tokens: int
    """Tokens that the request got."""
    sources: bytes
    """One byte per token, a Source; empty where nothing was drafted."""
    num_drafted: int
    num_accepted: int
    step_ms: int
    """Duration of the step; 0 where the shard did not say."""
    batch_tokens: int
    """Tokens that the step computed, of all its requests; 0 where the shard did not say."""
    num_running: int
    """Requests that ran on the shard."""


@dataclass(slots=True)
class Period:
    """A stay in one place."""

    name: str
    """adapter_load | queue | dispatch."""
    began_at: float
    """time.monotonic(), like `ended_at`."""
    fields: dict[str, str | int]
    ended_at: float | None = None
    """None while it lasts."""
    outcome: str = ""
    """Why it ended: a finish reason, `retried`, or an error's class; "" where the next period was the plan."""
    steps: list[StepEvent] = field(default_factory=list)
    num_left_out: int = 0
    """Steps beyond MAX_STEPS."""


class Timeline:
    """Timeline of one generation."""

    def __init__(self) -> None:
        self.periods: list[Period] = []

    def enter(self, name: str, **fields: str | int) -> None:
        """The next period begins, and the one before it ends."""
        self.leave("")
        self.periods.append(Period(name, time.monotonic(), fields))

    def leave(self, outcome: str) -> None:
        """The current period ends. Does nothing where none lasts."""
        if self.periods and self.periods[-1].ended_at is None:
            self.periods[-1].ended_at, self.periods[-1].outcome = time.monotonic(), outcome

    def step(self, output: pb.StepOutput, part: pb.RequestOutput, num_tokens: int, now: float) -> None:
        """A message of the shard that the request is on, with `part` for the request."""
        period = self.periods[-1]
        if len(period.steps) >= MAX_STEPS:
            period.num_left_out += 1
            return
        load = output.load
        period.steps.append(
            StepEvent(
                at=now,
                number=output.step,
                num_tokens=num_tokens,
                sources=part.sources[:num_tokens],
                num_drafted=sum(part.num_drafted),
                num_accepted=part.num_accepted,
                step_ms=load.step_ms,
                batch_tokens=load.step_tokens,
                num_running=load.num_running,
            )
        )

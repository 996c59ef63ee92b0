"""The step loop on a simulated clock: a pass of the model takes 1 on the device, the host's work for a step HOST, and a
pass of the draft model DRAFT. The device computes in the order of launches; the host waits where the engine waits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from lorikeet.shard.engine.engine import Engine
from lorikeet.shard.engine.step import HostResults, Step
from lorikeet.shard.grpc.streams import Output
from lorikeet.shard.requests.request import Request
from lorikeet.shard.sampling.drafting import DraftDraws
from lorikeet.shard.scheduler.scheduler import StepPlan
from tests.shard.fake_model import FakeModel
from tests.shard.rig import Rig

HOST, DRAFT = 0.15, 0.05


@dataclass
class Clock:
    """Time on host and device, in passes of the model."""

    now: float = 0.0
    """Time of the host."""
    device: float = 0.0
    """When the device will have computed all that was launched."""
    num_passes: int = 0
    idle: float = 0.0
    """Time for which nothing ran, because no request was there."""

    @property
    def busy(self) -> float:
        """The time in which there were requests."""
        return self.now - self.idle

    def launch(self, duration: float) -> None:
        self.device = max(self.now, self.device) + duration

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


@contextmanager
def simulated(rig: Rig, host: float = HOST) -> Iterator[Clock]:
    """Passes and waits of a rig take time on a clock."""
    clock, ends = Clock(), dict[int, float]()
    launch, to_host, drafts_to_host = Engine._launch, Step.to_host, DraftDraws.to_host

    def launch_timed(engine: Engine, plan: StepPlan) -> Step:
        clock.now += host
        step = launch(engine, plan)
        ends[step.number] = clock.device
        return step

    def wait_for_step(step: Step) -> HostResults:
        clock.wait(ends[step.number])
        return to_host(step)

    def wait_for_drafts(draws: DraftDraws) -> dict[int, list[int]]:
        clock.wait(clock.device)
        return drafts_to_host(draws)

    def forward_timed(model: FakeModel, duration: float) -> Callable[[], torch.Tensor]:
        forward = model.forward

        def timed() -> torch.Tensor:
            clock.num_passes += duration == 1.0
            clock.launch(duration)
            return forward()

        return timed

    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.engine", "system.timing"):
            times = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
            patch.setattr(f"lorikeet.shard.{module}.time", times)
        patch.setattr(Engine, "_launch", launch_timed)
        patch.setattr(Step, "to_host", wait_for_step)
        patch.setattr(DraftDraws, "to_host", wait_for_drafts)
        patch.setattr(rig.model, "forward", forward_timed(rig.model, 1.0))
        if rig.draft is not None:
            patch.setattr(rig.draft, "forward", forward_timed(rig.draft, DRAFT))
        yield clock


def run_staggered(
    rig: Rig, requests: Sequence[Request], interval: float, host: float = HOST
) -> tuple[Clock, dict[int, Output]]:
    """Run requests that arrive one after the other, `interval` apart."""
    with simulated(rig, host) as clock:
        num_arrived = 0
        while num_arrived < len(requests) or not rig.scheduler.is_idle:
            if rig.scheduler.is_idle and clock.now < interval * num_arrived:
                clock.idle += interval * num_arrived - clock.now
                clock.now = interval * num_arrived
            while num_arrived < len(requests) and clock.now >= interval * num_arrived:
                rig.submit(requests[num_arrived])
                num_arrived += 1
            rig.step()
    rig.assert_clean()
    return clock, rig.outputs

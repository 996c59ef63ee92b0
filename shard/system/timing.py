"""Times of a step's phases, and of the device waiting for the host between steps.

On CUDA they are measured by events in the order of the device's work, and the host does not wait for them.
"""

import time
from collections import deque
from enum import Enum, auto

import torch


class Phase(Enum):
    """Phase of a step with drafts."""

    FIRST_DRAFT = auto()
    """The draft model's first pass, where there is one."""
    DRAFT = auto()
    """Time after that until all drafts are known."""
    VERIFY = auto()
    ACCEPT = auto()


NOT_MEASURED = dict.fromkeys(Phase, 0.0)
"""Seconds of the phases of a step that is not measured."""


class PhaseTimer:
    """Marks the ends of a step's phases."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Without a device nothing is measured."""
        self._device = device
        self._phases: list[Phase] = []
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._note()

    def mark(self, phase: Phase) -> None:
        """A phase ends here, and the next begins."""
        self._phases.append(phase)
        self._note()

    def _note(self) -> None:
        if self._device is None:
            return
        if self._device.type == "cuda":
            self._events.append(_event(self._device))
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> dict[Phase, float]:
        """Seconds of each phase so far, 0 where it was not measured. Waits for the device."""
        if self._device is None:
            return NOT_MEASURED
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            seconds = [start.elapsed_time(end) / 1000 for start, end in pairs]
        else:
            seconds = [end - start for start, end in zip(self._times, self._times[1:], strict=False)]
        return NOT_MEASURED | dict(zip(self._phases, seconds, strict=False))


class IdleTime:
    """The device's time between the end of one step's work and the start of the next one's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._started: torch.cuda.Event | float | None = None
        """The end of the last step's work."""
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Starts and ends that the device has yet to reach."""
        self._seconds = 0.0

    def start(self) -> None:
        """All work of a step is launched."""
        self._started = time.perf_counter() if self._device is None else _event(self._device)

    def stop(self) -> None:
        """The work of a step begins here."""
        started, self._started = self._started, None
        if isinstance(started, float):
            self._seconds += time.perf_counter() - started
        elif started is not None:
            self._open.append((started, _event(self._device)))

    def reset(self) -> None:
        """Nothing is left to compute: do not count the time until the next step."""
        self._started = None

    def seconds(self) -> float:
        """All idle time that the device has reached so far."""
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            self._seconds += start.elapsed_time(end) / 1000
        return self._seconds


def _event(device: torch.device | None) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event

"""How long the phases of a step take, on the host or on the device. Knows no steps."""

import time
from enum import Enum, auto

import torch


class Phase(Enum):
    """Of a step with drafts."""

    FIRST_DRAFT = auto()
    """The draft model's first pass, where it has one …"""
    DRAFT = auto()
    """… and whatever else it takes until all drafts are there."""
    VERIFY = auto()
    ACCEPT = auto()


class Stopwatch:
    """Marks between phases. On CUDA they are set in the order of the device's work, and the host does not wait."""

    def __init__(self, device: torch.device) -> None:
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
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> dict[Phase, float]:
        """Of each phase so far. Waits for the device."""
        if not self._events:
            found = [end - start for start, end in zip(self._times, self._times[1:], strict=False)]
        else:
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            found = [start.elapsed_time(end) / 1000 for start, end in pairs]
        return dict(zip(self._phases, found, strict=True))

"""How long the phases of a step take, on the host or on the device. Knows no steps."""

import time

import torch


class Stopwatch:
    """Marks between phases. On CUDA they are set in the order of the device's work, and the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """A phase ends here, and the next begins."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each phase so far. Waits for the device."""
        if not self._events:
            return [end - start for start, end in zip(self._times, self._times[1:], strict=False)]
        self._events[-1].synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [start.elapsed_time(end) / 1000 for start, end in pairs]

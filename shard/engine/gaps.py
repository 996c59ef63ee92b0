"""How long the device waits for the host between one step and the next, while there is something to compute.

On CUDA told by events in the order of the device's work, read once they have passed: nobody waits for them.
"""

import time
from collections import deque

import torch


class Gaps:
    """What lies between the end of a step's work and the start of the next one's."""

    def __init__(self, device: torch.device) -> None:
        self._stream_of = device if device.type == "cuda" else None
        self._last: torch.cuda.Event | float | None = None
        """The end of the step before."""
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        """Ends and starts that the device has yet to pass."""
        self._seconds = 0.0

    def begin(self) -> None:
        """The work of a step begins here."""
        last, self._last = self._last, None
        if isinstance(last, float):
            self._seconds += time.perf_counter() - last
        elif last is not None:
            self._open.append((last, self._mark()))

    def end(self) -> None:
        """All of its work is launched."""
        self._last = time.perf_counter() if self._stream_of is None else self._mark()

    def rest(self) -> None:
        """Nothing is left to compute: what follows is no gap."""
        self._last = None

    def seconds(self) -> float:
        """Of all gaps so far that the device has passed."""
        while self._open and self._open[0][1].query():
            end, start = self._open.popleft()
            self._seconds += end.elapsed_time(start) / 1000
        return self._seconds

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._stream_of))
        return event

"""Stop strings in a growing text: finds the first complete one, and withholds text that may become one.

The result does not depend on how the text is divided into tokens and chunks.
"""

from collections.abc import Sequence


class StopMatcher:
    """Searches one text. `include` keeps the stop string in the text, else it is cut off."""

    __slots__ = ("_held", "_include", "_stops", "matched", "num_beyond")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""
        self.num_beyond = 0
        """Characters of the last text that came after the stop string."""

    def push(self, text: str) -> str:
        """Add text; returns what may be shown now. Once `matched`, the text is complete."""
        previous = len(self._held)
        data = self._held + text
        found = self._first(data)
        if found is not None:
            start, end = found
            self.matched = data[start:end]
            self.num_beyond = len(data) - end
            self._held = ""
            # Withheld text was not shown yet, except with `include`, which withholds nothing.
            return data[previous if self._include else 0 : end if self._include else start]
        keep = self._open_length(data)
        self._held = data[len(data) - keep :]
        return text if self._include else data[: len(data) - keep]

    def flush(self) -> str:
        """The withheld text, at the end of the generation."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _first(self, data: str) -> tuple[int, int] | None:
        """The match that ends first; among those that end together, the one that starts first."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = data.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop))
        return best

    def _open_length(self, data: str) -> int:
        """Length of the longest end of `data` with which a stop string could begin."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(data)), longest, -1):
                if data.endswith(stop[:length]):
                    longest = length
                    break
        return longest

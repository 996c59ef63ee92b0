"""Stop strings in a growing text: finds the first complete one, and withholds text that may become one.

The result does not depend on how the text is divided into tokens and chunks. The time per character does not depend on
the length of the stop strings (Knuth, Morris and Pratt's algorithm).
"""

import itertools
import re
from collections.abc import Mapping, Sequence

from lorikeet.router.errors import ValidationError

MAX_STOP_BYTES = 1 << 10
MAX_STOPS_BYTES = 8 << 10


def check_stops(stops: Sequence[str], most: int) -> None:
    """Raises ValidationError for more than `most` stop strings, and for too long ones."""
    if len(stops) > most:
        raise ValidationError(f"`stop` supports up to {most} stop sequences. Given: {len(stops)}", "stop")
    sizes = [len(stop) if len(stop) > MAX_STOP_BYTES else len(stop.encode()) for stop in stops]
    if max(sizes, default=0) > MAX_STOP_BYTES:
        raise ValidationError(f"a stop sequence of `stop` may have {MAX_STOP_BYTES} bytes", "stop")
    if sum(sizes) > MAX_STOPS_BYTES:
        raise ValidationError(f"the stop sequences of `stop` may have {MAX_STOPS_BYTES} bytes together", "stop")


class _Stop:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("_borders", "name", "num_matched", "text")

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        """As the request has it."""
        self.num_matched = 0
        self._borders = [0] * len(text)
        """Length of the longest beginning of the text, shorter than `text[: index + 1]`, with which that ends."""
        length = 0
        for index in range(1, len(text)):
            length = self._borders[index] = self._extended(length, text[index])

    def push(self, data: str, may_end: bool) -> int | None:
        """The number of characters of `data` up to the end of a match that counts, if `may_end`; None without one."""
        index = 0
        while index < len(data):
            if self.num_matched == 0:
                index = data.find(self.text[0], index)
                if index < 0:
                    return None
            self.num_matched = self._extended(self.num_matched, data[index])
            index += 1
            if self.num_matched == len(self.text):
                if may_end:
                    return index
                self.num_matched = self._borders[-1]
        return None

    def _extended(self, length: int, char: str) -> int:
        """`num_matched` after one more character, where it was `length` before."""
        while length and self.text[length] != char:
            length = self._borders[length - 1]
        return length + (self.text[length] == char)


MARKS = tuple(map(chr, range(0xD800, 0xDC00)))
"""Characters that no text contains. Each may stand for a token whose text is hidden."""
_WITHOUT_MARKS = dict.fromkeys(map(ord, MARKS))
_MAX_MARKED = 4
"""Tokens within one stop string of which each may be spelled; of further ones all or none."""


def _with_marks(stop: str, marks: Mapping[str, str]) -> set[str]:
    """The stop string with any of its hidden tokens as marks: each may be one token, or be spelled."""
    if not any(text in stop for text in marks):
        return {stop}
    pieces = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", stop)
    num_marked = len(pieces) // 2
    choices = itertools.product((False, True), repeat=num_marked) if num_marked <= _MAX_MARKED else ()
    every = (num_marked * (False,), num_marked * (True,))
    return {
        "".join(marks[piece] if at % 2 and are_marks[at // 2] else piece for at, piece in enumerate(pieces))
        for are_marks in (*choices, *every)
    }


class StopMatcher:
    """Searches one text. `include` keeps the stop string in the text, else it is cut off. `marks` has the character
    that stands for a hidden token, by the token's text.
    """

    __slots__ = ("_held", "_include", "_stops", "matched", "num_beyond")

    def __init__(self, stops: Sequence[str], include: bool, marks: Mapping[str, str] | None = None) -> None:
        written = [(text, stop) for stop in dict.fromkeys(stops) if stop for text in _with_marks(stop, marks or {})]
        self._stops = [_Stop(text, stop) for text, stop in written]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""
        self.num_beyond = 0
        """Characters of the last text that came after the stop string."""

    def push(self, text: str, may_end: bool = True) -> str:
        """Add text; returns what may be shown now. Once `matched`, the text is complete. Unless `may_end`, no stop
        string that ends in this text counts.
        """
        found = [(stop.push(text, may_end), stop) for stop in self._stops]
        ends = [(end, -len(stop.text), stop.name) for end, stop in found if end is not None]
        if ends:
            # The match that ends first; among those that end together, the one that starts first.
            end, length, self.matched = min(ends)
            self.num_beyond = len(text) - end
            shown = self._held + text[:end]
            self._held = ""
            # Withheld text was not shown yet, except with `include`, which withholds nothing.
            return without_marks(text[:end] if self._include else shown[: len(shown) + length])
        if self._include:
            return without_marks(text)
        data = self._held + text
        keep = max((stop.num_matched for stop in self._stops), default=0)
        self._held = data[len(data) - keep :]
        return without_marks(data[: len(data) - keep])

    def flush(self) -> str:
        """The withheld text, where the text ends; another one may begin."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.num_matched = 0
        return without_marks(held)


def without_marks(text: str) -> str:
    """The text that is shown."""
    return text if text.isascii() else text.translate(_WITHOUT_MARKS)

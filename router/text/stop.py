"""Stop strings in a growing text: finds the first complete one, and withholds text that may become one.

The result does not depend on how the text is divided into tokens and chunks. The time per character does not depend on
the length of the stop strings (Knuth, Morris and Pratt's algorithm).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

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
        """The text that the request has."""
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
        matches = [(stop.push(text, may_end), stop) for stop in self._stops]
        ends = [(end, -len(stop.text), stop.name) for end, stop in matches if end is not None]
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


class Start(Enum):
    """Where an output begins."""

    OPEN = "open"
    """In the reasoning, which the prompt opened."""
    CLOSED = "closed"
    """In the answer: the prompt closed the reasoning."""
    FREE = "free"
    """Before either: the model may reason first."""


@dataclass(frozen=True)
class ReasoningSyntax:
    """How one output writes its reasoning."""

    opening: str
    """"" where only the prompt opens it."""
    closings: tuple[str, ...]
    """Texts of which each closes it; the first is the usual one."""
    start: Start
    markers: tuple[str, ...] = ()
    """Texts between the parts of the output that belong to none of them."""
    is_once: bool = False
    """Whether all that follows the first of the answer is answer, as where that follows a grammar."""


class OutputPart(Enum):
    """What a piece of an output belongs to."""

    REASONING = "reasoning"
    ANSWER = "answer"
    MARK = "mark"
    """Neither: a marker, or white space next to one."""


MAX_GAP = 2
"""Most line ends between reasoning and an answer that follows a grammar: more would be the answer's."""


class AnswerFinder:
    """Divides the chunks of one output. The result does not depend on how its text is divided into chunks."""

    __slots__ = ("_gap", "_has_parts", "_held", "_is_at_start", "_is_open", "_reasoning")

    def __init__(self, reasoning: ReasoningSyntax) -> None:
        self._reasoning = reasoning
        self._is_open = self._has_parts = reasoning.start is Start.OPEN
        self._is_at_start = reasoning.start is not Start.CLOSED or (reasoning.is_once and bool(reasoning.markers))
        """Whether no text came since the output began or a marker ended, but for white space."""
        self._gap = MAX_GAP
        """Line ends that may still come between the parts of an output with `is_once`."""
        self._held = ""
        """Text that may turn out to belong to a marker."""

    def push(self, text: str) -> list[tuple[str, OutputPart]]:
        """What is decided by now, in its order."""
        self._held += text
        parts: list[tuple[str, OutputPart]] = []
        while marker := self._marker():
            start = self._held.find(marker)
            self._decide(parts, self._held[:start], at_marker=True)
            if not self._is_possible(marker):
                self._held = self._held[start:]
                continue
            parts.append((marker, OutputPart.MARK))
            self._held = self._held[start + len(marker) :]
            self._is_open = not self._is_open and marker == self._reasoning.opening
            self._is_at_start = self._has_parts = True
        end = len(self._held) - max((_overlap(self._held, marker) for marker in self._markers), default=0)
        if self._is_open or not self._is_at_start or self._has_parts or self._held[:end].strip():
            self._decide(parts, self._held[:end], at_marker=False)
            self._held = self._held[end:]
        return [part for part in parts if part[0]]

    def flush(self) -> tuple[str, OutputPart]:
        """The rest, at the end of the output."""
        held, self._held = self._held, ""
        return held, OutputPart.REASONING if self._is_open else OutputPart.ANSWER

    @property
    def _markers(self) -> tuple[str, ...]:
        """The texts that may come next."""
        reasoning = self._reasoning
        if self._is_open:
            return reasoning.closings
        if not reasoning.is_once:
            return (reasoning.opening, *reasoning.markers)
        if not self._is_at_start:
            return ()
        return reasoning.markers if self._has_parts else (reasoning.opening, *reasoning.markers)

    def _is_possible(self, marker: str) -> bool:
        return marker in self._markers

    def _marker(self) -> str:
        """The first of them in the text, the longest where several start there; "" where there is none."""
        places = [
            (self._held.find(marker), -len(marker), marker)
            for marker in self._markers
            if marker and marker in self._held
        ]
        return min(places)[2] if places else ""

    def _decide(self, parts: list[tuple[str, OutputPart]], text: str, at_marker: bool) -> None:
        if self._is_open:
            parts.append((text, OutputPart.REASONING))
        elif not self._is_at_start:
            parts.append((text, OutputPart.ANSWER))
        elif self._reasoning.is_once and self._has_parts:
            num_ends = min(self._gap, len(text) - len(text.lstrip("\n")))
            self._gap -= num_ends
            parts += [(text[:num_ends], OutputPart.MARK), (text[num_ends:], OutputPart.ANSWER)]
            self._is_at_start = not text[num_ends:]
        else:
            words = text.lstrip()
            is_dropped = self._has_parts or (at_marker and not words)
            parts.append((text[: len(text) - len(words)], OutputPart.MARK if is_dropped else OutputPart.ANSWER))
            parts.append((words, OutputPart.ANSWER))
            self._is_at_start = not words


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with and goes on after."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)

"""Reasoning in a growing text: which parts of an output are the answer, to which alone stop strings apply."""

from dataclasses import dataclass
from enum import Enum


class Start(Enum):
    """Where an output begins."""

    OPEN = "open"
    """In the reasoning, which the prompt opened."""
    CLOSED = "closed"
    """In the answer: the prompt closed the reasoning."""
    FREE = "free"
    """Before either: the model may reason first."""


@dataclass(frozen=True)
class Reasoning:
    """How one output writes its reasoning."""

    opening: str
    """"" where only the prompt opens it."""
    closings: tuple[str, ...]
    """Texts of which each closes it; the first is the usual one."""
    start: Start
    markers: tuple[str, ...] = ()
    """Texts between the parts of the output that belong to none of them."""


class AnswerFinder:
    """Divides the chunks of one output. The result does not depend on how its text is divided into chunks."""

    __slots__ = ("_has_parts", "_held", "_is_at_start", "_is_open", "_reasoning")

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._is_open = self._has_parts = reasoning.start is Start.OPEN
        self._is_at_start = reasoning.start is not Start.CLOSED
        """Whether no text came since the output began or a marker ended, but for white space."""
        self._held = ""
        """Text that may turn out to belong to a marker."""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """What is decided by now, in its order: texts, and whether each is part of the answer."""
        self._held += text
        parts: list[tuple[str, bool]] = []
        while marker := self._marker():
            start = self._held.find(marker)
            self._decide(parts, self._held[:start], at_marker=True)
            parts.append((marker, False))
            self._held = self._held[start + len(marker) :]
            self._is_open = not self._is_open and marker == self._reasoning.opening
            self._is_at_start = self._has_parts = True
        end = len(self._held) - max((_overlap(self._held, each) for each in self._markers), default=0)
        if self._is_open or not self._is_at_start or self._has_parts or self._held[:end].strip():
            self._decide(parts, self._held[:end], at_marker=False)
            self._held = self._held[end:]
        return [part for part in parts if part[0]]

    def flush(self) -> tuple[str, bool]:
        """The rest, at the end of the output, and whether it is part of the answer."""
        held, self._held = self._held, ""
        return held, not self._is_open

    @property
    def _markers(self) -> tuple[str, ...]:
        """Those that may come next."""
        reasoning = self._reasoning
        return reasoning.closings if self._is_open else (reasoning.opening, *reasoning.markers)

    def _marker(self) -> str:
        """The first of them in the text, the longest where several start there; "" where there is none."""
        places = [(self._held.find(each), -len(each), each) for each in self._markers if each and each in self._held]
        return min(places)[2] if places else ""

    def _decide(self, parts: list[tuple[str, bool]], text: str, at_marker: bool) -> None:
        if self._is_open or not self._is_at_start:
            parts.append((text, not self._is_open))
            return
        words = text.lstrip()
        parts.append((text[: len(text) - len(words)], not self._has_parts and not (at_marker and not words)))
        parts.append((words, True))
        self._is_at_start = not words


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with and goes on after."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)

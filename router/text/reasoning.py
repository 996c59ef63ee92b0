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
        end = len(self._held) - max((_overlap(self._held, each) for each in self._markers), default=0)
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
        """Those that may come next."""
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
        places = [(self._held.find(each), -len(each), each) for each in self._markers if each and each in self._held]
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

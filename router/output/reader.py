"""Readers: each turns the text of one generation into events, chunk by chunk, with equal results for any chunks."""

from typing import Protocol

import structlog

from lorikeet.router.output.events import ContentDelta, Event, Finish, FinishKind, ReasoningDelta, whole_call
from lorikeet.router.output.parser_process import Parse, ParserFailed, ParserProcess
from lorikeet.router.requests.types import FinishReason
from lorikeet.router.text.reasoning import AnswerFinder, Part, Reasoning

log = structlog.get_logger()

FINISH_KINDS = {
    FinishReason.LENGTH: FinishKind.LENGTH,
    FinishReason.EOS_TOKEN: FinishKind.STOP,
    FinishReason.STOP_SEQUENCE: FinishKind.STOP,
}


class Reader(Protocol):
    """Reader of one generation."""

    async def read(self, text: str, finish: FinishReason | None, stop_reason: int | str | None = None) -> list[Event]:
        """The events of more text. With the finish reason of the generation they end with a Finish. Never raises
        because of the text: what is not well-formed is content.
        """

    def close(self) -> None:
        """Nothing more will be read. May be called at any time, and more than once."""


class PlainReader:
    """All text is content."""

    async def read(self, text: str, finish: FinishReason | None, stop_reason: int | str | None = None) -> list[Event]:
        events: list[Event] = [ContentDelta(text)] if text else []
        if finish is not None:
            events.append(Finish(FINISH_KINDS[finish], stop_reason))
        return events

    def close(self) -> None:
        pass


class AnswerReader:
    """Reasoning, and then an answer that follows a grammar: all of that is content, whatever it contains."""

    def __init__(self, reasoning: Reasoning) -> None:
        """`reasoning.is_once`, since nothing follows the answer."""
        self._finder = AnswerFinder(reasoning)
        self._space: str | None = None
        """White space of the reasoning that is shown if more of it follows; None before the first word."""

    async def read(self, text: str, finish: FinishReason | None, stop_reason: int | str | None = None) -> list[Event]:
        parts = self._finder.push(text)
        if finish is not None:
            parts.append(self._finder.flush())
        events: list[Event] = []
        for part, kind in parts:
            shown = self._reasoning(part) if kind is Part.REASONING else part
            if shown and kind is not Part.MARK:
                events.append(ReasoningDelta(shown) if kind is Part.REASONING else ContentDelta(shown))
        if finish is not None:
            events.append(Finish(FINISH_KINDS[finish], stop_reason))
        return events

    def close(self) -> None:
        pass

    def _reasoning(self, text: str) -> str:
        """Without white space around the whole."""
        words = text.rstrip()
        if not words:
            self._space = None if self._space is None else self._space + text
            return ""
        shown = words.lstrip() if self._space is None else self._space + words
        self._space = text[len(words) :]
        return shown


class ParsedReader:
    """Content, reasoning and tool calls as the response template of the model or adapter finds them."""

    def __init__(self, process: ParserProcess, parse: Parse) -> None:
        self._process = process
        self._parse = parse
        self._num_calls = 0
        self._texts: list[str] = []
        """All so far."""
        self._is_parsed = True

    async def read(self, text: str, finish: FinishReason | None, stop_reason: int | str | None = None) -> list[Event]:
        if self._is_parsed:
            self._texts.append(text)
            try:
                pieces = await self._process.parse(self._parse, text, is_last=finish is not None)
            except ParserFailed as error:
                log.warning("output_not_parsed", reason=str(error))
                pieces = [["content", "".join(self._texts)[self._parse.num_settled :]]]
                self._is_parsed = False
        else:
            pieces = [["content", text]]
        events = [event for piece in pieces for event in self._events(piece)]
        if finish is not None:
            kind = FINISH_KINDS[finish]
            if kind is FinishKind.STOP and self._num_calls:
                kind = FinishKind.TOOL_CALLS
            events.append(Finish(kind, stop_reason))
        return events

    def close(self) -> None:
        self._process.drop(self._parse)

    def _events(self, piece: list[str]) -> list[Event]:
        kind, text = piece[0], piece[1]
        if kind == "reasoning":
            return [ReasoningDelta(text)]
        if kind == "content":
            return [ContentDelta(text)] if text else []
        self._num_calls += 1
        index = self._num_calls - 1
        return whole_call(index, text, piece[2])

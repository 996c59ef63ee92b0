"""Readers: each turns the text of one generation into events, chunk by chunk, with equal results for any chunks.

Response templates are parsed in a process of its own, many outputs at a time: texts that arrive in one turn of the
event loop are a batch. A process that ends is started again, and its outputs are parsed again from their beginning, so
nothing is lost or delivered twice. An output whose text ends the process when it is parsed alone is given up.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
import structlog

from lorikeet.proto.children import LineProcess, ProcessEnded
from lorikeet.proto.process import limited_environment, python
from lorikeet.router.output.events import ContentDelta, Event, Finish, FinishKind, ReasoningDelta, whole_call
from lorikeet.router.requests.request import FinishReason
from lorikeet.router.text.stop import AnswerFinder, OutputPart, ReasoningSyntax

log = structlog.get_logger()

BATCH_SECONDS, SECONDS_PER_JOB = 5.0, 0.6
"""Above these the process is killed; its own time limit of a job is lower."""
SLOW_SECONDS = 0.05
"""A response template whose step takes longer is slow. An ordinary step takes less than 1 ms."""


class ParserFailed(Exception):
    """The output cannot be parsed: the reason."""


class ParserUnavailable(ParserFailed):
    """The process does not start."""


@dataclass(eq=False)
class Parse:
    """One output that is being parsed."""

    number: int
    opening: orjson.Fragment
    """`template`, `prefix` and `tools` as JSON."""
    texts: list[str] = field(default_factory=list)
    """All so far, as they were parsed."""
    num_pieces: int = 0
    """Pieces that were delivered."""
    num_settled: int = 0
    """Characters that those stand for."""
    field: str | None = None
    """The region that the text is in."""
    epoch: int = -1
    """Epoch of the process that knows this output."""
    owner: str = ""
    """Who is answerable for the response template."""
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class _ParseJob:
    parse: Parse
    texts: list[str]
    is_last: bool
    answer: asyncio.Future[list[list[str]]]


class ParserProcess(LineProcess):
    """One process, started on demand and again after it has ended.

    `on_slow` is called with the owner of a response template of which a step is slow or fails.
    """

    command = python("lorikeet.router.output.parser_worker")
    max_line_bytes = 256 << 20
    start_s = 60.0
    log_name = "parser_process"

    def __init__(self, on_slow: Callable[[str], None] = lambda _: None) -> None:
        super().__init__()
        self._on_slow = on_slow
        self._epoch = 0
        self._numbers = itertools.count()
        self._jobs: list[_ParseJob] = []
        self._dropped: list[int] = []
        self._worker: asyncio.Task[None] | None = None

    def first_line(self) -> bytes:
        return orjson.dumps({"drop": [], "jobs": []})

    def environment(self) -> dict[str, str]:
        home = {"HOME": os.environ["HOME"]} if "HOME" in os.environ else {}
        return limited_environment() | home | {"HF_HUB_OFFLINE": "1"}

    def open(self, template: dict[str, Any], prefix: str, tools: list[dict[str, Any]], owner: str = "") -> Parse:
        """A new output, after a prompt that ends with `prefix`. Raises ParserFailed."""
        try:
            opening = orjson.dumps({"template": template, "prefix": prefix, "tools": tools})
        except TypeError:
            raise ParserFailed("it is not valid JSON") from None
        return Parse(next(self._numbers), orjson.Fragment(opening), owner=owner)

    async def parse(self, parse: Parse, text: str, *, is_last: bool = False) -> list[list[str]]:
        """The pieces that more text gives. Raises ParserFailed."""
        job = _ParseJob(parse, [text] if text else [], is_last, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await job.answer

    def drop(self, parse: Parse) -> None:
        """Nothing more of it will be parsed."""
        if not parse.is_dropped and parse.epoch == self._epoch:
            self._dropped.append(parse.number)
        parse.is_dropped = True

    async def _try_start(self) -> bool:
        self._epoch += 1
        self._dropped.clear()
        return await super()._try_start()

    async def warm(self) -> None:
        """Start the process, so that the first output need not wait for it."""
        nothing = self.open({"start_anchor": "-", "fields": {"content": {}}}, "", [])
        with contextlib.suppress(ParserFailed):  # then the first output tries it again
            await self.parse(nothing, "", is_last=True)

    async def close(self) -> None:
        """Kill the process, if there is one."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await super().close()

    async def _work(self) -> None:
        """Until no job waits. Not in the callers' tasks: when a caller leaves, the batch goes on."""
        while self._jobs:
            await asyncio.sleep(0)  # every reader that was woken together adds its text
            jobs, self._jobs = self._jobs, []
            try:
                await self._run(jobs)
            except BaseException as failure:
                error = failure if isinstance(failure, ParserFailed) else ParserFailed(type(failure).__name__)
                for job in jobs:
                    if not job.answer.done():
                        job.answer.set_exception(error)
                if not isinstance(failure, Exception):
                    raise
                log.error("output_parser_failed", reason=str(error))

    async def _run(self, jobs: list[_ParseJob]) -> None:
        try:
            await self._batch(jobs)
        except (ProcessEnded, TimeoutError):
            log.warning("output_parser_ended", num_outputs=len(jobs))
            for job in jobs:  # one by one: only the output that ends the process is given up
                try:
                    await self._batch([job])
                except (ProcessEnded, TimeoutError):
                    self._on_slow(job.parse.owner)
                    _give_up(job, "parsing it ends the process")

    async def _batch(self, jobs: list[_ParseJob]) -> None:
        jobs = [job for job in jobs if not job.answer.done()]
        try:
            await self.start()
        except ProcessEnded as error:
            raise ParserUnavailable("the process that parses outputs did not start") from error
        dropped, self._dropped = self._dropped, []
        is_known = [job.parse.epoch == self._epoch for job in jobs]
        questions = [self._question(job, known) for job, known in zip(jobs, is_known, strict=True)]
        seconds = BATCH_SECONDS + SECONDS_PER_JOB * len(jobs)
        answers = orjson.loads(await self.exchange(orjson.dumps({"drop": dropped, "jobs": questions}), seconds))
        for job, known, answer in zip(jobs, is_known, answers, strict=True):
            self._settle(job, known, answer)

    def _question(self, job: _ParseJob, is_known: bool) -> dict[str, Any]:
        question: dict[str, Any] = {"id": job.parse.number, "texts": job.texts, "last": job.is_last}
        if not is_known:
            question |= {"open": job.parse.opening, "texts": [*job.parse.texts, *job.texts]}
        return question

    def _settle(self, job: _ParseJob, was_known: bool, answer: dict[str, Any]) -> None:
        parse = job.parse
        if "error" in answer or (was_known and answer["seconds"] > SLOW_SECONDS):
            self._on_slow(parse.owner)
        if "error" in answer:
            _give_up(job, answer["error"])
            return
        pieces = answer["pieces"] if was_known else answer["pieces"][parse.num_pieces :]
        parse.epoch = self._epoch
        if parse.is_dropped and not job.is_last:
            self._dropped.append(parse.number)
        parse.texts += job.texts
        parse.num_pieces += len(pieces)
        parse.num_settled, parse.field = answer["settled"], answer["field"]
        if not job.answer.done():
            job.answer.set_result(pieces)


def _give_up(job: _ParseJob, reason: str) -> None:
    job.parse.epoch = -1
    if not job.answer.done():
        job.answer.set_exception(ParserFailed(reason))


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

    def __init__(self, reasoning: ReasoningSyntax) -> None:
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
            shown = self._reasoning(part) if kind is OutputPart.REASONING else part
            if shown and kind is not OutputPart.MARK:
                events.append(ReasoningDelta(shown) if kind is OutputPart.REASONING else ContentDelta(shown))
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

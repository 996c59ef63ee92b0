"""Parses outputs in a process of its own, many at a time. Texts that arrive in one turn of the event loop are a batch.

A process that ends is started again, and the outputs that it parsed are parsed again from their beginning: nothing is
lost, and nothing is delivered twice. An output whose text ends the process when it is parsed alone is given up.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog

from lorikeet.proto.process import LineProcess, ProcessEnded, limited_environment, python

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
class _Job:
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
        self._jobs: list[_Job] = []
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
        job = _Job(parse, [text] if text else [], is_last, asyncio.get_running_loop().create_future())
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
                given = failure if isinstance(failure, ParserFailed) else ParserFailed(type(failure).__name__)
                for job in jobs:
                    if not job.answer.done():
                        job.answer.set_exception(given)
                if not isinstance(failure, Exception):
                    raise
                log.error("output_parser_failed", reason=str(given))

    async def _run(self, jobs: list[_Job]) -> None:
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

    async def _batch(self, jobs: list[_Job]) -> None:
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

    def _question(self, job: _Job, is_known: bool) -> dict[str, Any]:
        question: dict[str, Any] = {"id": job.parse.number, "texts": job.texts, "last": job.is_last}
        if not is_known:
            question |= {"open": job.parse.opening, "texts": [*job.parse.texts, *job.texts]}
        return question

    def _settle(self, job: _Job, was_known: bool, answer: dict[str, Any]) -> None:
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


def _give_up(job: _Job, reason: str) -> None:
    job.parse.epoch = -1
    if not job.answer.done():
        job.answer.set_exception(ParserFailed(reason))

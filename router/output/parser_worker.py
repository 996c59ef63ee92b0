"""Parses outputs with transformers' response parser, in a process of its own: no other one imports transformers.

Run as `python -m lorikeet.router.output.parser_worker`, it answers each line of JSON, a batch of jobs, with another
until its input ends. Every job has a time limit, since response templates contain regular expressions of their authors.
"""

import contextlib
import json
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

JOB_SECONDS = 0.5
_REPEATED_SECONDS = 0.001
"""More for each text of a job: one that is parsed again after a crash has many."""
_MAX_MEMORY = 2 << 30
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TOOL_CALLS = "tool_calls"
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


class LocatedParser(ResponseParser):
    """The library's parser, which also knows where the open region began, and goes on after a malformed one."""

    def __init__(self, template: dict[str, Any], prefix: str, tools: list[dict[str, Any]]) -> None:
        self._opened_at = 0
        self._pos: int
        super().__init__(template, prefix="", tools=tools)
        anchor = self._spec.start_anchor_re.search(prefix)
        if prefix and anchor is not None:  # without an anchor the library would parse the whole prompt
            self._consume_prefix(prefix)
        self._prefix_length = len(self._buffer)

    @property
    def open_field(self) -> str | None:
        """The region that the text is in, if it had to be opened."""
        return self._current if self._current != self._implicit_name else None

    @property
    def num_settled(self) -> int:
        """Characters of the text behind which nothing depends on what follows."""
        if self.open_field is not None and self.open_field not in _REASONING:
            return max(0, self._opened_at - self._prefix_length)
        return max(0, self._pos - self._prefix_length)

    def finish(self) -> list[dict[str, Any]]:
        """The last events; fields that the template requires may be missing."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _scan(self, watch: list[tuple[str, Any]], eos: bool) -> tuple[tuple[str, Any, Any] | None, int]:
        """The library's, but a text within a string of a call's JSON object does not close the call."""
        best, hold_start = super()._scan(watch, eos)
        while best is not None and best[0] == "close" and self._is_in_string(best[1], best[2].start()):
            end = best[2].end()
            self._body += self._buffer[self._pos : end]
            self._pos = end
            best, hold_start = super()._scan(watch, eos)
        return best, hold_start

    def _is_in_string(self, field: Any, end: int) -> bool:
        if self._current != _TOOL_CALLS or field.content != "json" or field.content_args:
            return False
        rest = _STRING.sub("", self._body + self._buffer[self._pos : end])
        return '"' in rest and "\n" not in rest[rest.index('"') :]  # no JSON string has a line end: it is malformed

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
        self._opened_at = match.start()
        super()._open_explicit(events, field, match)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, is_open = self._current, self._opened
        try:
            super()._close_current(events)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if is_open and field == self._implicit_name:
                self._reset_to_implicit()
                return
            events.append({"type": "region_malformed", "field": field})
            self._reset_to_implicit()
        if events and events[-1]["type"] in ("region_close", "region_malformed"):
            events[-1]["raw"] = self._buffer[self._opened_at : self._pos]


class OutputParser:
    """One output: from its text to pieces `["content", text]`, `["reasoning", text]` and `["call", name, arguments]`.

    White space next to a region is dropped, except between two texts. An output without regions is left as it is. A
    call that is not well-formed, or of a function that the request does not have, is content as it was written.
    """

    def __init__(self, template: dict[str, Any], prefix: str, tools: list[dict[str, Any]]) -> None:
        self._parser = LocatedParser(template, prefix, tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._pending = ""
        """White space of content that is shown if content follows."""
        self._before_region = ""
        """White space before the open region."""
        self._gap = ""
        """White space that is shown if text follows text after regions."""
        self._has_regions = bool(self._parser.initial_events)
        self._has_started = False
        """Whether the current run of content or reasoning has text."""
        self._has_content = False
        self._pieces: list[list[str]] = []

    @property
    def open_field(self) -> str | None:
        return self._parser.open_field

    @property
    def num_settled(self) -> int:
        """Characters of the text that the pieces so far stand for."""
        return self._parser.num_settled - len(self._pending) - len(self._before_region)

    def feed(self, text: str) -> list[list[str]]:
        return self._take(self._parser.feed(text))

    def finish(self) -> list[list[str]]:
        pieces = self._take(self._parser.finish())
        if self._pending and not self._has_regions:
            pieces.append(["content", self._pending])
        self._pending = ""
        return pieces

    def _take(self, events: list[dict[str, Any]]) -> list[list[str]]:
        self._pieces = []
        for event in events:
            self._handle(event["type"], event["field"], event)
        return self._pieces

    def _handle(self, kind: str, field: str, event: dict[str, Any]) -> None:
        if kind == "region_open":
            if field != "content":
                self._begin_region()
        elif kind == "region_chunk" and field != _TOOL_CALLS:
            self._add("reasoning" if field in _REASONING else "content", event["text"])
        elif kind == "region_close" and field == _TOOL_CALLS:
            calls = calls_of(event["value"], self._names)
            if calls is None:
                self._restore(event["raw"])
            else:
                self._pieces += [["call", name, arguments] for name, arguments in calls]
                self._before_region = ""
        elif kind == "region_malformed":
            self._restore(event["raw"])
        if kind in ("region_close", "region_malformed") and field != "content":
            self._end_region(kind == "region_malformed")

    def _begin_region(self) -> None:
        self._has_regions, self._has_started = True, False
        self._before_region, self._pending = self._pending, ""
        self._gap = self._gap or self._before_region

    def _end_region(self, was_malformed: bool) -> None:
        self._has_started = was_malformed
        self._before_region = self._pending = ""

    def _restore(self, raw: str) -> None:
        self._pieces.append(["content", self._before_region + raw])
        self._before_region = self._gap = ""
        self._has_content = True

    def _add(self, kind: str, text: str) -> None:
        if self._has_regions and not self._has_started:
            text = text.lstrip()
            if not text:
                return
            if kind == "content" and self._has_content:
                text = (self._gap or "\n") + text
            self._gap = ""
        whole = self._pending + text
        shown = whole.rstrip()
        self._pending = whole[len(shown) :]
        if shown:
            self._has_started = True
            self._has_content |= kind == "content"
            self._pieces.append([kind, shown])


def calls_of(value: Any, names: set[str]) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of a region's value; None if one of them is not well-formed, or unknown."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = None if function is None else _arguments(function.get("arguments"))
        if not isinstance(name, str) or name not in names or arguments is None:
            return None
        calls.append((name, arguments))
    return calls or None


def _arguments(value: Any) -> str | None:
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if value is None:
            return "{}"
        if not isinstance(value, dict):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_text(text) else json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


class ParserWorker:
    """The outputs that are being parsed, by number."""

    def __init__(self) -> None:
        self._parsers: dict[int, OutputParser] = {}

    def answer(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """One answer per job, in their order."""
        for number in batch["drop"]:
            self._parsers.pop(number, None)
        return [self._timed(job) for job in batch["jobs"]]

    def _timed(self, job: dict[str, Any]) -> dict[str, Any]:
        """Seconds of processor time count: what other processes take does not make a template slow."""
        start = time.process_time()
        return {**self._run(job), "seconds": time.process_time() - start}

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        number = job["id"]
        try:
            with _limited(JOB_SECONDS + len(job["texts"]) * _REPEATED_SECONDS):
                return self._parse(number, job)
        except TimeoutError:
            error = f"a step of it takes more than {JOB_SECONDS:g} s of processor time"
        except MemoryError:
            error = "it needs too much memory"
        except Exception as failure:  # the library raises what a template makes it raise
            error = f"{type(failure).__name__}: {failure}"[:500]
        self._parsers.pop(number, None)
        return {"error": error}

    def _parse(self, number: int, job: dict[str, Any]) -> dict[str, Any]:
        if (opening := job.get("open")) is not None:
            self._parsers[number] = OutputParser(opening["template"], opening["prefix"], opening["tools"])
        parser = self._parsers[number]
        pieces = [piece for text in job["texts"] for piece in parser.feed(text)]
        if job["last"]:
            pieces += parser.finish()
            self._parsers.pop(number, None)
        return {"pieces": pieces, "settled": parser.num_settled, "field": parser.open_field}


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in its block after so much processor time; regular expressions can be interrupted.

    Time that other processes take does not count: on a busy machine an ordinary output is not given up.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _on_timeout(number: int, frame: object) -> None:
    raise TimeoutError


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _on_timeout)
    worker = ParserWorker()
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

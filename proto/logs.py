"""Logs of every process: one event per line, for people or as JSON, and each line one write to the common pipe.

As JSON every line has `timestamp`, `level`, `process` and `event` (snake_case), and the event's fields. For people it
is `2026-01-31T12:00:00Z INFO    router: request method=POST …`, with readable sizes. Log lines never hold a prompt or a
token: callers log counts, lengths and ids only. Lines of libraries (`library_message`), Python's warnings and
uncaught exceptions take the same form.
"""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

log = structlog.get_logger()


def configure(json_output: bool, level: str, process: str = "", silenced: Sequence[str] = ()) -> None:
    """Set up all logs of this process, on standard error. Call it before libraries are imported, and `adopt_libraries`
    after. `process` is a field of every line; lines of the loggers `silenced` are dropped.

    Raises ValueError for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}")
    shared = _first(process)
    last = _last(json_output)
    if json_output:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *shared, *last],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line and its end are one write
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=True,
    )
    # Log lines of libraries: warnings and worse. An HTTP client's lines hold adapter names that callers sent.
    _take_all(_handler(sys.stderr, [_library_message, *shared], last), max(number, logging.WARNING), log.error)
    for name in silenced:
        logging.getLogger(name).disabled = True


def start_launcher(json_output: bool, level: str, stream: TextIO) -> logging.Logger:
    """The launcher's logger, writing to `stream`. Its messages are `event_name: a sentence`.

    With JSON, whatever else this process would print becomes JSON too. Lines of children pass through unchanged.
    """
    first, last = [_named_sentence, *_first("launcher")], _last(json_output)
    handler = _handler(stream, first, last)
    logger = logging.getLogger("lorikeet.launcher")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(level.upper())
    if json_output:
        _take_all(handler, logging.WARNING, lambda event, exc_info, **_: logger.error(f"{event}: ", exc_info=exc_info))
    return logger


def adopt_libraries() -> None:
    """Take over the lines of imported libraries that installed handlers of their own."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers and not logger.name.startswith("lorikeet"):
            logger.handlers.clear()
            logger.propagate = True


def _handler(stream: TextIO, first: Sequence[Processor], last: Sequence[Processor]) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=first, processors=[strip, *last]))
    return handler


def _take_all(handler: logging.Handler, level: int, error: Callable[..., Any]) -> None:
    """Write libraries' lines from `level` on, Python's warnings and uncaught exceptions by `handler` and `error`."""
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        error("uncaught_exception", thread=args.thread and args.thread.name, exc_info=args.exc_value)

    sys.excepthook = lambda kind, value, trace: error("uncaught_exception", exc_info=(kind, value, trace))
    threading.excepthook = in_thread
    sys.unraisablehook = lambda args: error("uncaught_exception", exc_info=args.exc_value)


def _first(process: str) -> list[Processor]:
    """What every line has."""

    def add_process(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if process:
            event["process"] = process
        return event

    return [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), add_process]


def _last(json_output: bool) -> list[Processor]:
    """From an event to the text of its line."""
    if json_output:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    return [structlog.processors.format_exc_info, _plain]


_NAMED = re.compile(r"([a-z]+(?:_[a-z0-9]+)+): ?(.*)", re.DOTALL)


def _named_sentence(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """`event_name: a sentence` as `event` and `message`; everything else is a library's."""
    match = _NAMED.fullmatch(event["event"])
    if match is None:
        return _library_message(logger, method, event)
    return {**event, "event": match[1], **({"message": match[2]} if match[2] else {})}


def _library_message(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {**event, "event": "library_message", "message": event["event"]}


_HEAD = ("timestamp", "level", "process", "event", "message", "exception")


def _plain(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """One line for people, and an exception's lines after it."""
    stamp, level = f"{event['timestamp'][:19]}Z", event["level"].upper()
    words = [event["event"] + (":" if "message" in event else ""), *filter(None, [event.get("message")])]
    words += [f"{name}={_readable(name, value)}" for name, value in event.items() if name not in _HEAD]
    lines = [f"{stamp} {level:7} {event.get('process', 'lorikeet')}: {' '.join(words)}"]
    return "\n".join([*lines, *filter(None, [event.get("exception")])])


def _readable(name: str, value: Any) -> str:
    """Bytes by name as a size; texts with spaces in quotes."""
    if name.endswith("bytes") and isinstance(value, int) and not isinstance(value, bool):
        return readable_size(value).replace(" ", "")
    text = value if isinstance(value, str) else str(value)
    return repr(text) if isinstance(value, str) and (not text or re.search(r"[\s'\"]", text)) else text


def readable_size(count: float) -> str:
    """A number of bytes for people, such as `4.2 GB`."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

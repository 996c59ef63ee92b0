"""Logs of every process: one event per line, for people or as JSON, and each line one write to the common pipe.

Log lines never hold a prompt or a token: callers log counts, lengths and ids only. Lines of libraries, Python's
warnings and uncaught exceptions take the same form.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

log = structlog.get_logger()


def configure(json_output: bool, level: str, process: str = "", silenced: Sequence[str] = ()) -> None:
    """Set up all logs of this process, on standard error. Call it before libraries are imported, and `adopt_libraries`
    after. `process` is added to every line; lines of the loggers `silenced` are dropped.

    Raises ValueError for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}")
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if json_output:
        last: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    else:
        plain = structlog.dev.plain_traceback  # other formatters print the values of local names: texts and tokens
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *last],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line and its end are one write
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=True,
    )
    if process:
        structlog.contextvars.bind_contextvars(process=process)
    # Of libraries: warnings and worse. An HTTP client's lines hold adapter names that callers sent.
    _take_all(_handler(sys.stderr, shared, last), max(number, logging.WARNING), log.error)
    for name in silenced:
        logging.getLogger(name).disabled = True


def start_launcher(json_output: bool, level: str, stream: TextIO) -> logging.Logger:
    """The launcher's logger, writing sentences to `stream`: for people, or as JSON in LoRAX's shape.

    With JSON, whatever else this process would print becomes JSON too. Lines of children pass through unchanged.
    """
    stamp = structlog.processors.TimeStamper(fmt="iso" if json_output else "%Y-%m-%dT%H:%M:%SZ", utc=True)
    as_json = structlog.processors.JSONRenderer(ensure_ascii=False)
    last: list[Processor] = [structlog.processors.format_exc_info, _lorax_shape, as_json]
    handler = _handler(stream, [structlog.processors.add_log_level, stamp], last if json_output else [_sentence])
    logger = logging.getLogger("lorikeet.launcher")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(level.upper())
    if json_output:
        _take_all(handler, logging.WARNING, lambda event, exc_info, **_: logger.error(event, exc_info=exc_info))
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


def _lorax_shape(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    fields = {"message": event["event"]} | ({"exception": event["exception"]} if "exception" in event else {})
    level = event["level"].upper()
    return {"timestamp": event["timestamp"], "level": level, "fields": fields, "target": "lorikeet_launcher"}


def _sentence(logger: WrappedLogger, method: str, event: EventDict) -> str:
    return f"{event['timestamp']} {event['level'].upper():7} launcher: {event['event']}"

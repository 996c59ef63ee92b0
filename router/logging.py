"""Structured logs: one event per line, for the console or as JSON, with the request's id where there is one.

Callers log counts, lengths and ids only, never a prompt or a token.
"""

import logging
import sys
import threading
from types import TracebackType
from typing import Any

import structlog

log = structlog.get_logger()


def configure_logging(level: str = "info", json_output: bool = False) -> None:
    """Write our events, those of libraries, warnings and uncaught exceptions to stderr in one format."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if json_output:
        last: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback  # other formatters print local variables: texts and tokens
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *last],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line with its newline is one write
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries log warnings and errors only: an HTTP client's info lines hold the adapter names of requests.
    root.setLevel(max(_number(level), logging.WARNING))
    access = logging.getLogger("uvicorn.access")
    access.handlers[:] = [logging.NullHandler()]
    access.propagate = False
    logging.captureWarnings(True)
    _log_uncaught()


def _log_uncaught() -> None:
    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.error("uncaught_exception", exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        log.error("uncaught_exception", thread=args.thread and args.thread.name, exc_info=args.exc_value)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = lambda args: log.error("uncaught_exception", exc_info=args.exc_value)


def _number(level: str) -> int:
    numbers = logging.getLevelNamesMapping() | {
        "TRACE": logging.DEBUG,
        "WARN": logging.WARNING,
        "OFF": logging.CRITICAL,
    }
    try:
        return numbers[level.upper()]
    except KeyError:
        raise ValueError(f"unknown log level {level!r}") from None

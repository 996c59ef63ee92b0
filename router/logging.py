"""Structured logs: one event per line, console or JSON, with the request's id in each line that concerns a request.

Never a prompt, never a token: callers log counts, lengths and ids only.
"""

import logging
import sys
import threading
from types import TracebackType
from typing import Any

import structlog

log = structlog.get_logger()


def configure_logging(level: str = "info", json_output: bool = False) -> None:
    """Send our events, those of libraries, warnings and what nobody caught to stderr in one form."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if json_output:
        last: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback  # others print the values of local names: texts and tokens
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *last],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line and its end are one write
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Of libraries, Uvicorn too: warnings and worse. An HTTP client's lines hold what callers took for adapters' names.
    root.setLevel(max(_number(level), logging.WARNING))
    access = logging.getLogger("uvicorn.access")
    access.handlers[:] = [logging.NullHandler()]
    access.propagate = False
    logging.captureWarnings(True)
    _log_what_nobody_caught()


def _log_what_nobody_caught() -> None:
    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.error("uncaught_exception", exc_info=(kind, error, trace))

    def in_thread(told: threading.ExceptHookArgs) -> None:
        name = told.thread.name if told.thread else None
        log.error("uncaught_exception", thread=name, exc_info=told.exc_value)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = lambda told: log.error("uncaught_exception", exc_info=told.exc_value)


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

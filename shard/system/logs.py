"""Sets up a shard's logs: text or JSON, never with prompts or tokens.

Logs of libraries, Python's warnings and uncaught exceptions have the same format.
"""

import logging
import os
import sys
import threading
from types import TracebackType

import structlog

log = structlog.get_logger()


def configure(json_output: bool, level: str) -> None:
    """Set up all logs of this process; call it before libraries are imported, and `adopt_libraries` after.

    Raises ValueError for a level that does not exist.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}")
    # A plain traceback: richer ones print the values of local names, which may be tokens.
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json_output
        else structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    )
    first: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor] = [
        *([structlog.processors.format_exc_info] if json_output else []),
        renderer,
    ]
    structlog.configure(
        processors=[*first, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line and its end are one write
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process="shard")
    handler = logging.StreamHandler(sys.stderr)
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=first, processors=[strip, *last]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))  # lower levels of libraries are of no use to operators
    logging.captureWarnings(True)
    _log_what_nobody_caught()
    if json_output:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def adopt_libraries() -> None:
    """Replace the handlers that libraries have installed."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def _log_what_nobody_caught() -> None:
    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.error("uncaught exception", exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else None
        log.error("uncaught exception", thread=name, exc_info=args.exc_value)

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = lambda args: log.error("uncaught exception", exc_info=args.exc_value)

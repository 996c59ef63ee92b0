"""How the loader logs: lines for people or JSON, never a token."""

import logging
import sys
import threading

import structlog

log = structlog.get_logger()


def configure(json_output: bool, level: str) -> None:
    """Set up the logs of this process. Raises ValueError for a level that does not exist."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}")
    # a plain traceback: others print the values of local names, and those are tokens
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json_output
        else [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
    )
    first: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*first, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line and its end are one write
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process="loader")
    handler = logging.StreamHandler(sys.stderr)
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=first, processors=[strip, *last]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))  # what libraries say of less is not for operators
    sys.excepthook = lambda kind, error, trace: log.error("uncaught exception", exc_info=(kind, error, trace))
    threading.excepthook = lambda told: log.error("uncaught exception", exc_info=told.exc_value)
    sys.unraisablehook = lambda told: log.error("uncaught exception", exc_info=told.exc_value)


def adopt_libraries() -> None:
    """Take the lines of libraries that brought handlers of their own."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True

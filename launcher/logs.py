"""The launcher's own log lines: readable ones, or JSON in LoRAX's shape, and then whatever else it would print is JSON
too. Lines of children pass through untouched.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        line = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "level": record.levelname,
            "fields": fields,
            "target": "lorikeet_launcher",
        }
        return json.dumps(line, ensure_ascii=False)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return f"{moment} {record.levelname:7} launcher: {record.getMessage()}"


def start(json_output: bool, level: str, stream: TextIO) -> logging.Logger:
    """The launcher's logger, writing to `stream`."""
    logger = logging.getLogger("lorikeet.launcher")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if json_output else _Plain())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    if json_output:
        _take_everything(logger, handler)
    return logger


def adopt_libraries() -> None:
    """Take the lines of libraries that brought handlers of their own, once they are imported."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers and not logger.name.startswith("lorikeet"):
            logger.handlers.clear()
            logger.propagate = True


def _take_everything(logger: logging.Logger, handler: logging.Handler) -> None:
    """Libraries' lines, Python's warnings and exceptions that nobody caught."""
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logger.error("uncaught exception", exc_info=(kind, error, trace))

    def in_thread(told: threading.ExceptHookArgs) -> None:
        logger.error("uncaught exception", exc_info=told.exc_value)

    sys.excepthook = uncaught
    threading.excepthook = in_thread

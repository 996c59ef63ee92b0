"""The launcher's own log lines: readable ones, or JSON in LoRAX's shape. Lines of children pass through untouched."""

import json
import logging
from datetime import UTC, datetime
from typing import TextIO


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z"),
            "level": record.levelname,
            "fields": {"message": record.getMessage()},
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
    return logger

"""`--chat-template`: a file, or the template itself."""

from pathlib import Path

from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import refuse

_MAX_BYTES = 1 << 20
_MARKS = ("{", "}", "\n")
"""A text with one of them is a template, not a path."""


def read(settings: Settings) -> str | None:
    """The text of the template; None for the model's own. Raises LauncherError."""
    given: str | None = settings["chat-template"]
    if given is None:
        return None
    origin = settings.given["chat-template"]
    if settings["tokenizer-config-path"] is not None:
        refuse(f"{origin} and {settings.given['tokenizer-config-path']} both give a chat template: give one")
    if any(mark in given for mark in _MARKS):
        return given
    try:
        content = Path(given).read_bytes()
        text = content.decode()
    except OSError as error:
        refuse(f"{origin} {given} cannot be read: {error.strerror}. A template itself contains {{ and }}")
    except UnicodeDecodeError:
        refuse(f"{origin} {given} is not a text in UTF-8")
    if not text or len(content) > _MAX_BYTES:
        refuse(f"{origin} {given} must have 1 to {_MAX_BYTES} bytes")
    return text

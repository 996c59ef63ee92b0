"""Why an adapter cannot be used: errors with a message, an HTTP status and a retry delay. Imports no torch.

The loader's process sends them to the router as small dictionaries.
"""

import errno
from typing import Any


class AdapterError(Exception):
    """An adapter cannot be used. The message is one sentence for the user and names the adapter."""

    status: int = 422
    retry_after: float | None = None
    """Seconds after which a retry may succeed."""

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        # it may quote a file: half of a pair of surrogates could not be sent to anybody
        super().__init__(message.encode(errors="replace").decode())
        self.status = self.status if status is None else status
        self.retry_after = self.retry_after if retry_after is None else retry_after

    def as_dict(self) -> dict[str, Any]:
        """The form in which the loader sends it."""
        kind = type(self).__name__
        return {"kind": kind, "message": str(self), "status": self.status, "retry_after": self.retry_after}


class AdapterNotFound(AdapterError):
    """No such adapter exists, or the caller may not know that it does."""

    status = 404


class AdapterNotAllowed(AdapterError):
    """The caller may not use it: 401 without a token, 403 if the token has no access."""

    status = 403


class AdapterInvalid(AdapterError):
    """An adapter's files are broken, malicious, or made for another base model."""


class AdapterTooLarge(AdapterError):
    """An adapter's files exceed the server's limit."""


class NotServed(AdapterError):
    """The adapter is valid, and of a type that the server does not support."""


class SourceUnreachable(AdapterError):
    """The source does not answer."""

    status = 503
    retry_after = 5.0


class InvalidAnswer(SourceUnreachable):
    """The source answers, and not as its protocol permits."""

    status = 502


class AdapterChanged(SourceUnreachable):
    """An adapter's files changed after they were looked up. The new ones can be looked up."""

    retry_after = 1.0


class LoaderFailed(AdapterError):
    """The loader itself failed; the adapter may be valid."""

    status = 500


class StoreFull(LoaderFailed):
    """There is no room for it on disk now."""

    status = 503
    retry_after = 5.0


_LEAVES = (InvalidAnswer, AdapterChanged, StoreFull)
_ALL: tuple[type[AdapterError], ...] = (AdapterError, *AdapterError.__subclasses__(), *_LEAVES)
KINDS = {kind.__name__: kind for kind in _ALL}


def from_dict(values: dict[str, Any]) -> AdapterError:
    """The error that `as_dict` wrote; an unknown kind becomes LoaderFailed."""
    kind = KINDS.get(str(values.get("kind")), LoaderFailed)
    status, retry_after = values.get("status"), values.get("retry_after")
    return kind(
        str(values.get("message", "the adapter could not be loaded")),
        status=status if isinstance(status, int) else None,
        retry_after=retry_after if isinstance(retry_after, int | float) else None,
    )


def is_full(error: OSError) -> bool:
    """Whether the disk is full or the server's user has reached a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def not_stored(error: OSError) -> LoaderFailed:
    """Neither the adapter nor its source is at fault: a retry may succeed once there is space."""
    kind = StoreFull if is_full(error) else LoaderFailed
    return kind(f"the adapter cannot be stored: {error.strerror}", status=503, retry_after=5.0)


class HeadsError(Exception):
    """An error of `lorikeet-heads`: one sentence that says what is wrong with which name or file."""


def first_line(error: BaseException) -> str:
    """The beginning of another library's message, which may be many lines long."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""What can be wrong with an adapter, as errors that name the fault, the HTTP status and when to come back.

Each travels between the loader's process and the router as a small dictionary. Imports no torch.
"""

import errno
from typing import Any


class AdapterError(Exception):
    """An adapter cannot be used. The message is one sentence for the user, and names the adapter."""

    status: int = 422
    retry_after: float | None = None
    """Seconds after which it may work."""

    def __init__(self, message: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status
        if retry_after is not None:
            self.retry_after = retry_after

    def as_dict(self) -> dict[str, Any]:
        """As the loader's answer carries it."""
        return {
            "kind": type(self).__name__,
            "message": str(self),
            "status": self.status,
            "retry_after": self.retry_after,
        }


class AdapterNotFound(AdapterError):
    """No adapter of that name is there, or none that this caller may know of."""

    status = 404


class AdapterNotAllowed(AdapterError):
    """The caller may not use it: 401 where it showed no token, 403 where its token has no right."""

    status = 403


class AdapterInvalid(AdapterError):
    """Its files are broken, hostile, or made for another base."""


class AdapterTooLarge(AdapterError):
    """Its files are larger than this server takes."""


class NotServed(AdapterError):
    """It is a sound adapter of a kind that this server does not serve."""


class SourceUnreachable(AdapterError):
    """The source gives no answer, and without one nothing can be said."""

    status = 503
    retry_after = 5.0


class LoaderFailed(AdapterError):
    """The loader itself went wrong; the adapter need not be at fault."""

    status = 500


def is_full(error: OSError) -> bool:
    """Whether there is no room left, on the disk or of what the server's user may have of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def not_stored(error: OSError) -> LoaderFailed:
    """The adapter is not at fault, and its source is not: it may work once there is room."""
    return LoaderFailed(f"the adapter cannot be stored: {error.strerror}", status=503, retry_after=5.0)


KINDS: dict[str, type[AdapterError]] = {
    kind.__name__: kind
    for kind in (
        AdapterError,
        AdapterNotFound,
        AdapterNotAllowed,
        AdapterInvalid,
        AdapterTooLarge,
        NotServed,
        SourceUnreachable,
        LoaderFailed,
    )
}


def from_dict(values: dict[str, Any]) -> AdapterError:
    """The error that `as_dict` wrote; an unknown kind becomes LoaderFailed."""
    kind = KINDS.get(str(values.get("kind")), LoaderFailed)
    status, retry_after = values.get("status"), values.get("retry_after")
    return kind(
        str(values.get("message", "the adapter could not be loaded")),
        status=status if isinstance(status, int) else None,
        retry_after=retry_after if isinstance(retry_after, int | float) else None,
    )

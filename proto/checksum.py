"""The checksum in the header of a file in the served layout: SHA-256 of all its bytes, its own counted as zeros."""

import hashlib
from collections.abc import Iterable

FIELD = "sha256"
"""In the header's metadata."""
UNKNOWN = "0" * 64
"""The value until all bytes are known."""
_START = f'"{FIELD}":"'.encode()
"""Not part of any string of the header, in which quotes are escaped."""
CHUNK = 16 << 20
"""Bytes to read at a time."""


def added(head: bytes, values: Iterable[memoryview]) -> bytes:
    """`head`, the prefix and header of a file whose checksum is UNKNOWN, with that of itself and of `values`."""
    start, end = _place(head)
    digest = hashlib.sha256(head)
    for each in values:
        digest.update(each)
    return head[:start] + digest.hexdigest().encode() + head[end:]


def matches(head: bytes, values: Iterable[bytes | memoryview]) -> bool:
    """Whether a file's bytes, prefix and header first, are those of its checksum; False without one.

    Releases the interpreter lock for large values.
    """
    try:
        start, end = _place(head)
    except ValueError:
        return False
    digest = hashlib.sha256(head[:start] + UNKNOWN.encode() + head[end:])
    for each in values:
        digest.update(each)
    return digest.hexdigest().encode() == head[start:end]


def _place(head: bytes) -> tuple[int, int]:
    """Where the checksum is. Raises ValueError if there is none."""
    start = head.index(_START) + len(_START)
    return start, start + len(UNKNOWN)

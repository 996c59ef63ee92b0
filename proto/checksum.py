"""The checksum in the header of a file in the served layout: SHA-256 of the SHA-256s of the header, in which the
checksum counts as zeros, and of each piece of what follows. Pieces can be hashed by several threads.
"""

import hashlib
from collections.abc import Iterable, Iterator

FIELD = "sha256_of_pieces"
"""In the header's metadata."""
UNKNOWN = "0" * 64
"""The value until all bytes are known."""
_START = f'"{FIELD}":"'.encode()
"""Not part of any string of the header, in which quotes are escaped."""
PIECE = 4 << 20
"""Bytes of a piece; the last one has the rest."""


def added(head: bytes, values: Iterable[bytes | memoryview]) -> bytes:
    """`head`, the prefix and header of a file whose checksum is UNKNOWN, with that of itself and of `values`."""
    start, end = _place(head)
    return head[:start] + _combined(head, _digests(values)) + head[end:]


def matches(head: bytes, values: Iterable[bytes | memoryview]) -> bool:
    """Whether a file's bytes, prefix and header first, are those of its checksum; False without one."""
    return matches_pieces(head, _digests(values))


def matches_pieces(head: bytes, digests: Iterable[bytes]) -> bool:
    """`matches`, with `of_piece` of each piece behind the header."""
    try:
        start, end = _place(head)
    except ValueError:
        return False
    return _combined(head[:start] + UNKNOWN.encode() + head[end:], digests) == head[start:end]


def of_piece(piece: bytes | memoryview) -> bytes:
    """Releases the interpreter lock."""
    return hashlib.sha256(piece).digest()


def _digests(values: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """`of_piece` of each piece of the joined values."""
    digest, left = hashlib.sha256(), PIECE
    for value in values:
        rest = memoryview(value)
        while len(rest):
            part, rest = rest[:left], rest[left:]
            digest.update(part)
            left -= len(part)
            if not left:
                yield digest.digest()
                digest, left = hashlib.sha256(), PIECE
    if left < PIECE:
        yield digest.digest()


def _combined(head: bytes, digests: Iterable[bytes]) -> bytes:
    return hashlib.sha256(of_piece(head) + b"".join(digests)).hexdigest().encode()


def _place(head: bytes) -> tuple[int, int]:
    """Where the checksum is. Raises ValueError if there is none."""
    start = head.index(_START) + len(_START)
    return start, start + len(UNKNOWN)

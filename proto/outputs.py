"""The connection for outputs: on one host a shard sends the messages of a stream over a Unix socket of their own.

A router connects to `socket_path`, sends a token, TOKEN_BYTES random hex digits, and gives the same token in the
metadata CONNECTION of its call of Serve. Every `StepOutput` of this stream follows on the connection, after its length
in HEADER_BYTES bytes, little-endian. The shard closes the connection before the call ends.
"""

from pathlib import Path

CONNECTION = "outputs-connection"
TOKEN_BYTES, HEADER_BYTES = 32, 4
MAX_MESSAGE_BYTES = 16 << 20
"""A router reads no larger message. A shard's are below 4 MiB."""


def socket_path(address: str) -> Path | None:
    """Where a shard with this gRPC address listens for such connections; None for one that is not on this host."""
    return Path(address.removeprefix("unix:") + ".out") if address.startswith("unix:") else None


def framed(message: bytes) -> bytes:
    """A message after its length."""
    return len(message).to_bytes(HEADER_BYTES, "little") + message

"""Connections that carry outputs to routers on the same host, without gRPC's threads (proto/outputs.py describes them).

Everything runs in the event loop of the gRPC server.
"""

import asyncio
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.outputs import CONNECTION, TOKEN_BYTES, framed

CLAIM_S = 10.0
"""Time from a connection to the call that names it, and from the call to its connection."""


class OutputConnection(asyncio.Protocol):
    """A router's connection: it has sent its token, or will."""

    def __init__(self, owner: "OutputSocket") -> None:
        self._owner = owner
        self._transport: asyncio.WriteTransport
        self._unclaimed: asyncio.TimerHandle
        """Closes it where no stream wants it."""
        self.token = b""
        self._is_open = True
        self._writable = asyncio.Event()
        """Set while the socket has taken everything, and once the connection has ended."""
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(0)
        self._unclaimed = asyncio.get_running_loop().call_later(CLAIM_S, self._transport.abort)
        self._owner.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.token += data
        if len(self.token) > TOKEN_BYTES or (len(self.token) == TOKEN_BYTES and not self._owner.add(self)):
            self._transport.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_open = False
        self._writable.set()
        self._unclaimed.cancel()
        self._owner.forget(self)

    def claimed(self) -> None:
        """A stream uses it from now on."""
        self._unclaimed.cancel()

    async def write(self, message: pb.StepOutput) -> None:
        """Wait until the socket has taken the message. Raises ConnectionError where the router has closed it."""
        if self._is_open:
            self._transport.write(framed(message.SerializeToString()))
            await self._writable.wait()
        if not self._is_open:
            raise ConnectionError("the router has closed the connection for outputs")

    def close(self) -> None:
        """End it once the socket has taken everything."""
        self._transport.close()

    def abort(self) -> None:
        """End it now."""
        self._transport.abort()


class OutputSocket:
    """Listens for connections, and keeps them by their token until streams claim them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server
        self.connections: set[OutputConnection] = set()
        """All that are open."""
        self._by_token: dict[bytes, asyncio.Future[OutputConnection]] = {}
        """Connections that no stream has claimed, and what streams wait for."""

    async def listen(self) -> None:
        """Raises OSError."""
        listening = socket.socket(socket.AF_UNIX)
        self._path.unlink(missing_ok=True)
        with private_sockets():
            listening.bind(str(self._path))
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: OutputConnection(self), sock=listening
        )

    async def claim(self, token: str) -> OutputConnection:
        """The connection that sends this token. Raises LookupError where none does in time."""
        try:
            async with asyncio.timeout(CLAIM_S):
                connection = await self._of(token.encode())
        except TimeoutError:
            raise LookupError("no connection for outputs has sent the token of this stream") from None
        finally:
            self._by_token.pop(token.encode(), None)
        connection.claimed()
        return connection

    def add(self, connection: OutputConnection) -> bool:
        """Whether the token of the connection is no other's."""
        claim = self._of(connection.token)
        if claim.done():
            return False
        claim.set_result(connection)
        return True

    def forget(self, connection: OutputConnection) -> None:
        """The connection has ended."""
        self.connections.discard(connection)
        claim = self._by_token.get(connection.token)
        if claim is not None and claim.done() and claim.result() is connection:
            del self._by_token[connection.token]

    def close(self) -> None:
        """Listen no longer, and end all connections: the event loop does not close before what they still have to write
        is written.
        """
        self._server.close()
        for connection in list(self.connections):
            connection.abort()
        self._path.unlink(missing_ok=True)

    def _of(self, token: bytes) -> "asyncio.Future[OutputConnection]":
        return self._by_token.setdefault(token, asyncio.get_running_loop().create_future())


async def connection_of(
    metadata: Iterable[tuple[str, str]] | None, output_socket: OutputSocket | None
) -> OutputConnection | None:
    """What the metadata of a stream's call names; None where the router reads outputs from gRPC. Raises LookupError."""
    token = dict(metadata or ()).get(CONNECTION)
    if token is None:
        return None
    if output_socket is None:
        raise LookupError("this shard has no socket for outputs")
    return await output_socket.claim(token)


@contextmanager
def private_sockets() -> Iterator[None]:
    """Only the owner can open a socket that is bound within the block."""
    mask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(mask)

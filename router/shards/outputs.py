"""How a shard's outputs reach the dispatcher: the connection that carries them on one host (proto/outputs.py describes
it), and which messages are delivered together.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Self, cast

from google.protobuf.message import DecodeError

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.outputs import CONNECTION, HEADER_BYTES, MAX_MESSAGE_BYTES, TOKEN_BYTES, socket_path

JOIN_REQUESTS = 64
"""With at least this many running requests, a process that cannot keep up waits for one more message."""
JOIN_LOAD = 0.9
"""A process cannot keep up while its CPU time is more than this fraction of the elapsed time."""
JOIN_SECONDS = 0.002
"""Maximum seconds of one wait."""
MAX_JOINED = 8
"""With so many messages none is waited for."""
CONNECT_SECONDS = 10.0


class Arrivals:
    """Messages of one stream on their way to `deliver`.

    Writing to many clients costs far more than reading a message. So where this process cannot keep up, and many
    requests run, messages wait a moment for the next one: outputs of several steps reach each client as one write.
    """

    def __init__(self, deliver: Callable[[Sequence[pb.StepOutput]], None]) -> None:
        self._deliver = deliver
        self._held: list[pb.StepOutput] = []
        self._timer: asyncio.TimerHandle | None = None
        """Delivers what is held."""
        self._at, self._cpu = time.monotonic(), time.process_time()
        """Of the last delivery."""

    def add(self, outputs: Sequence[pb.StepOutput]) -> None:
        """Deliver messages, now or together with the next one."""
        is_held = bool(self._held) or self._is_late(outputs[-1])
        self._held += outputs
        if not is_held or len(self._held) >= MAX_JOINED:
            self.flush()
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(JOIN_SECONDS, self.flush)

    def flush(self) -> None:
        """Deliver what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        outputs, self._held = self._held, []
        self._at, self._cpu = time.monotonic(), time.process_time()
        if outputs:
            self._deliver(outputs)

    def _is_late(self, output: pb.StepOutput) -> bool:
        if output.load.num_running < JOIN_REQUESTS:
            return False
        return time.process_time() - self._cpu > JOIN_LOAD * (time.monotonic() - self._at)


class OutputConnection(asyncio.Protocol):
    """The connection of one stream, over which all its outputs come."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        self._transport: asyncio.WriteTransport
        self._buffer = bytearray()
        """The start of a message."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why nothing more comes, "" where the shard or this router has closed it."""

    @classmethod
    async def open(cls, address: str, arrivals: Arrivals) -> Self:
        """To the shard with this gRPC address. Raises OSError."""
        connection = cls(arrivals)
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, str(socket_path(address)))
        return connection

    @property
    def metadata(self) -> tuple[str, str]:
        """Names the connection in the stream's call."""
        return (CONNECTION, self._token)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass
        self._transport.write(self._token.encode())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, first, outputs = self._buffer, 0, []
        while len(buffer) >= (start := first + HEADER_BYTES):
            size = int.from_bytes(buffer[first:start], "little")
            if size > MAX_MESSAGE_BYTES:
                self._end(f"the shard announced a message of {size} bytes")
                break
            if len(buffer) < start + size:
                break
            first = start + size
            try:
                outputs.append(pb.StepOutput.FromString(bytes(memoryview(buffer)[start:first])))
            except DecodeError:
                self._end("the shard sent a message that is no StepOutput")
                break
        del buffer[:first]
        if outputs:
            self._arrivals.add(outputs)

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the connection for outputs ended within a message" if self._buffer else "")

    def close(self) -> None:
        """Read nothing more."""
        self._transport.abort()

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
            self._transport.abort()

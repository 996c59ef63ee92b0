"""Outputs over a connection of their own, over real Unix sockets, with the step loop in a thread and a fake model."""

import os
import secrets
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.outputs import CONNECTION, HEADER_BYTES, TOKEN_BYTES, socket_path
from lorikeet.shard.grpc import outputs, streams
from tests.shard.fake_model import generate_alone
from tests.shard.grpc.test_server import TIMEOUT_S, Shard, Stream, make_submit, wait_until
from tests.shard.rig import Setup


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path, Setup(num_pages=1000))
    made.ready()
    yield made
    made.stop()


def connection_to(shard: Shard) -> socket.socket:
    path = socket_path(shard.address)
    assert path is not None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(path))
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the shard closes it within the time limit, and sends nothing before."""
    try:
        return connection.recv(1) == b""
    except (ConnectionResetError, TimeoutError) as error:
        return isinstance(error, ConnectionResetError)


class Reading(Stream):
    """A stream whose outputs come over a connection of their own."""

    def __init__(self, shard: Shard, token: str = "", is_named_first: bool = True) -> None:
        self.connection = connection_to(shard)
        token = token or secrets.token_hex(TOKEN_BYTES // 2)
        if is_named_first:
            self.connection.sendall(token.encode())
        super().__init__(shard.address, ((CONNECTION, token),))
        if not is_named_first:
            self.connection.sendall(token.encode())
        self._data = b""

    def _take(self, size: int) -> bytes:
        while len(self._data) < size:
            received = self.connection.recv(1 << 20)
            if not received:
                raise EOFError
            self._data += received
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def next_message(self) -> pb.StepOutput:
        return pb.StepOutput.FromString(self._take(int.from_bytes(self._take(HEADER_BYTES), "little")))

    def code(self) -> grpc.StatusCode:
        """The status of a call over which nothing came."""
        with pytest.raises(grpc.RpcError) as ended:
            next(self.messages)
        code = ended.value.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    def close(self) -> None:
        super().close()
        self.connection.close()


@pytest.mark.parametrize("is_named_first", [True, False])
def test_the_outputs_are_those_of_grpc(shard: Shard, is_named_first: bool) -> None:
    prompts = {number: [number, 7, 3] for number in range(1, 40)}
    submits = [make_submit(number, prompt, 30) for number, prompt in prompts.items()]
    streams = [Stream(shard.address), Reading(shard, is_named_first=is_named_first), Reading(shard)]
    for stream in streams:
        stream.send(submits=submits)
    for stream in streams:
        stream.read_until_ended(*prompts)
        assert all(stream.tokens(number) == generate_alone(prompt, 30) for number, prompt in prompts.items())
        stream.close()


def test_only_its_owner_can_open_the_socket(shard: Shard) -> None:
    path = socket_path(shard.address)
    assert path is not None and stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert shard.path.with_name("shard.sock.out") == path
    stub = Stream(shard.address)
    assert stub.stub.Info(pb.InfoRequest(), timeout=TIMEOUT_S).outputs_socket
    stub.close()


def test_the_socket_of_a_shard_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "shard.sock.out"))
    shard = Shard(tmp_path, Setup())
    shard.ready()
    connection_to(shard).close()
    shard.stop()
    assert not (tmp_path / "shard.sock.out").exists()


def test_garbage_and_tokens_of_no_stream_are_closed(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    with connection_to(shard) as connection:
        connection.sendall(bytes(TOKEN_BYTES + 1))
        assert is_closed(connection)
    token = secrets.token_hex(TOKEN_BYTES // 2).encode()
    with connection_to(shard) as first, connection_to(shard) as second:
        first.sendall(token)
        wait_until(lambda: bool(output_socket(shard)._by_token))
        second.sendall(token)
        assert is_closed(second), "the token is taken"
    wait_until(lambda: not output_socket(shard)._by_token)
    monkeypatch.setattr(outputs, "CLAIM_S", 0.1)
    with connection_to(shard) as silent, connection_to(shard) as named:
        named.sendall(token)
        assert is_closed(silent)
        assert is_closed(named)
    wait_until(lambda: not output_socket(shard)._by_token)


def output_socket(shard: Shard) -> outputs.OutputSocket:
    found = shard.server._service.output_socket
    assert found is not None
    return found


def test_a_stream_without_its_connection_is_rejected(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "CLAIM_S", 0.1)
    stream = Stream(shard.address, ((CONNECTION, "0" * TOKEN_BYTES),))
    with pytest.raises(grpc.RpcError, match="no connection for outputs has sent the token") as ended:
        stream.read()
    assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    stream.close()
    assert not output_socket(shard)._by_token
    gone = Reading(shard)  # its connection was there, and is not any more
    gone.connection.close()
    assert gone.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
    gone.close()


def test_a_connection_that_breaks_ends_its_stream_alone(shard: Shard) -> None:
    broken, other = Reading(shard), Reading(shard)
    other.send(submits=[make_submit(1, [9], 60)])
    broken.send(submits=[make_submit(number, [number, 2], 500) for number in range(1, 6)])
    broken.read()
    broken.connection.close()
    assert broken.code() is grpc.StatusCode.UNAVAILABLE
    other.read_until_ended(1)
    assert other.tokens(1) == generate_alone([9], 60)
    wait_until(lambda: shard.rig.scheduler.is_idle)
    shard.rig.assert_clean()
    broken.close()
    other.close()


def test_a_router_that_ends_its_call_closes_the_connection(shard: Shard) -> None:
    stream = Reading(shard)
    stream.send(submits=[make_submit(1, [1, 2], 500)])
    stream.read()
    stream.messages.cancel()
    with pytest.raises(EOFError):
        while True:
            stream.read()
    wait_until(lambda: shard.rig.scheduler.is_idle)
    shard.rig.assert_clean()
    stream.close()


def test_a_connection_that_is_not_read_ends_its_stream(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNSENT_BYTES", 1 << 20)
    silent, other = Reading(shard), Reading(shard)
    logprobs = pb.Logprobs(wanted=True, alternatives=40)
    for first in range(0, 400, 8):  # the socket holds some of the outputs
        silent.send(submits=[make_submit(first + i, [i, 2, 3], 200, logprobs=logprobs) for i in range(8)])
    other.send(submits=[make_submit(1, [9], 60)])
    other.read_until_ended(1)
    assert silent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(EOFError):
        while True:
            silent.read()
    assert silent.outputs
    for number, parts in silent.outputs.items():
        tokens = [token for output in parts for token in output.token_ids]
        assert tokens == generate_alone([number % 8, 2, 3], 200)[: len(tokens)], "nothing is missing within it"
    wait_until(lambda: shard.rig.scheduler.is_idle)
    shard.rig.assert_clean()
    silent.close()
    other.close()


def test_all_outputs_come_before_the_end_of_a_shard(tmp_path: Path) -> None:
    shard = Shard(tmp_path, Setup(num_pages=1000))
    shard.ready()
    stream = Reading(shard)
    stream.send(submits=[make_submit(1, [1, 2], 60)])
    while 1 not in stream.outputs:
        stream.read()
    shard.stop()
    with pytest.raises(EOFError):
        while True:
            stream.read()
    with pytest.raises(StopIteration):
        next(stream.messages)
    assert stream.tokens(1) == generate_alone([1, 2], 60)
    stream.close()


def test_a_shard_ends_although_a_router_does_not_read(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNSENT_BYTES", 1 << 20)
    silent = Reading(shard)
    logprobs = pb.Logprobs(wanted=True, alternatives=40)
    for first in range(0, 400, 8):
        silent.send(submits=[make_submit(first + i, [i, 2, 3], 200, logprobs=logprobs) for i in range(8)])
    assert silent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    ender = threading.Thread(target=shard.stop, daemon=True)
    ender.start()
    ender.join(TIMEOUT_S)
    assert not ender.is_alive()
    silent.close()

"""Authentication of a shard on TCP."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto import shard_pb2_grpc
from lorikeet.router.config import RouterConfig
from lorikeet.router.shards.link import ShardAccess
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.grpc.auth import Access
from lorikeet.shard.grpc.codec import Bounds
from lorikeet.shard.grpc.server import Facts, Server
from lorikeet.shard.grpc.streams import Inbox, Outbox

SECRET = "a secret of some length"


def config(**values: str) -> ShardConfig:
    return ShardConfig("model", "/model", **{"listen": "127.0.0.1:0"} | values)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    authority = trustme.CA()
    pair = authority.issue_cert("shards.example")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    pair.private_key_pem.write_to_path(tmp_path / "key")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    return {name: str(tmp_path / name) for name in ("ca", "key", "cert", "secret")}


@pytest.fixture
def serve() -> Iterator[object]:
    servers = []

    def start(access: Access) -> str:
        server = Server("127.0.0.1:0", Inbox(), Outbox(), access)
        servers.append(server)
        address = server.start()
        server.ready(Facts(pb.ShardInfo(model_id="m"), Bounds(10, 10, 10), lambda: (0, 0.0), Future))
        return address

    yield start
    for server in servers:
        server.stop()


def ask(channel: grpc.Channel, secret: str = "") -> pb.ShardInfo:
    metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
    return shard_pb2_grpc.ShardStub(channel).Info(pb.InfoRequest(), timeout=20, metadata=metadata)


def test_tcp_without_authentication_is_rejected(files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"anyone who reaches 127\.0\.0\.1:0"):
        Access.of(config())
    with pytest.raises(ValueError, match="anyone who reaches"):  # encrypted, but open to everyone
        Access.of(config(shard_tls_cert_path=files["cert"], shard_tls_key_path=files["key"]))
    Access.of(config(listen="unix:/private/shard.sock"))
    (tmp_path / "short").write_text("too short")
    with pytest.raises(ValueError, match="fewer than 16 characters"):
        Access.of(config(secret_path=str(tmp_path / "short")))


def test_calls_need_the_secret_and_health_needs_none(files: dict[str, str], serve: object) -> None:
    address = serve(Access.of(config(secret_path=files["secret"])))  # type: ignore[operator]
    with grpc.insecure_channel(address) as channel:
        assert ask(channel, SECRET).model_id == "m"
        for wrong in ("", "x", SECRET + "x"):
            with pytest.raises(grpc.RpcError) as caught:
                ask(channel, wrong)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = shard_pb2_grpc.ShardStub(channel).Serve(iter([]), timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.anyio
async def test_mutual_tls_checks_both_certificates(files: dict[str, str], serve: object) -> None:
    of_shard = {
        "shard_tls_cert_path": files["cert"],
        "shard_tls_key_path": files["key"],
        "shard_tls_ca_path": files["ca"],
    }
    address = serve(Access.of(config(**of_shard)))  # type: ignore[operator]
    access = ShardAccess.of(RouterConfig("m", "/m", (address,), **of_shard))  # type: ignore[arg-type]
    async with access.channel(address, "shards.example", []) as channel:
        info = await shard_pb2_grpc.ShardStub(channel).Info(pb.InfoRequest(), timeout=20)
        assert info.model_id == "m"
    without_certificate = ShardAccess.of(RouterConfig("m", "/m", (address,), shard_tls_ca_path=files["ca"]))
    for other, name in ((without_certificate, "shards.example"), (access, "elsewhere.example"), (ShardAccess(), "")):
        async with other.channel(address, name, []) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await shard_pb2_grpc.ShardStub(channel).Info(pb.InfoRequest(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

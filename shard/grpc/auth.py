"""Who may use a shard over TCP: routers that show the secret, or a certificate of an authority, or both.

A Unix socket needs neither: its folder lets in its owner alone. Health is told to everybody.
"""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from lorikeet.shard.config import ShardConfig

SHORTEST_SECRET = 16
_GUARDED = "/lorikeet.shard.v1.Shard/"


@dataclass(frozen=True)
class Access:
    """What is asked of who connects."""

    secret: str = ""
    """Shown as a bearer's in the metadata of each call; empty asks for none."""
    credentials: grpc.ServerCredentials | None = None
    """Of TLS; with an authority's certificate the router must have one of it too."""

    @classmethod
    def of(cls, config: ShardConfig) -> Self:
        """Raises ValueError where a TCP address would be open to everybody, or a file is of no use."""
        secret = "" if config.secret_path is None else read_secret(Path(config.secret_path))
        credentials = None
        if config.shard_tls_cert_path is not None and config.shard_tls_key_path is not None:
            pair = Path(config.shard_tls_key_path).read_bytes(), Path(config.shard_tls_cert_path).read_bytes()
            authority = None if config.shard_tls_ca_path is None else Path(config.shard_tls_ca_path).read_bytes()
            credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
        if (
            not config.listen.startswith("unix:")
            and not secret
            and (credentials is None or config.shard_tls_ca_path is None)
        ):
            raise ValueError(
                f"whoever reaches {config.listen} could use this shard: it needs a secret (--shard-secret-file), or TLS"
                " and an authority whose certificates routers show (--shard-tls-cert, --shard-tls-key, --shard-tls-ca)"
            )
        return cls(secret, credentials)

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [Guard(self.secret)] if self.secret else []


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls through that show the secret."""

    def __init__(self, secret: str) -> None:
        self._expected = f"Bearer {secret}".encode()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_GUARDED) or self._knows(details):
            return handler
        make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_unary_rpc_method_handler
        return make(_refuse, handler.request_deserializer, handler.response_serializer)

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        shown = next((value for name, value in details.invocation_metadata or () if name == "authorization"), "")
        return hmac.compare_digest(str(shown).encode(), self._expected)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this shard asks for its secret")


def read_secret(path: Path) -> str:
    """Raises ValueError for one that could be guessed, OSError where there is no file."""
    secret = path.read_text().strip()
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(f"the secret in {path} has fewer than {SHORTEST_SECRET} characters")
    return secret

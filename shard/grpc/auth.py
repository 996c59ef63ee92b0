"""Authenticates routers over TCP: by a shared secret, by mutual TLS, or by both.

A Unix socket needs neither: only the owner of its folder can open it. The health service is open to everyone.
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
    """Credentials that a client must present."""

    secret: str = ""
    """Bearer token in the metadata of each call; empty requires none."""
    credentials: grpc.ServerCredentials | None = None
    """TLS of the server; with a certificate authority the client must present a certificate signed by it."""

    @classmethod
    def of(cls, config: ShardConfig) -> Self:
        """Raises ValueError if a TCP address would be open to everyone or the secret is too short."""
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
                f"anyone who reaches {config.listen} could use this shard: set a secret (--shard-secret-file) or mutual"
                " TLS (--shard-tls-cert, --shard-tls-key, --shard-tls-ca)"
            )
        return cls(secret, credentials)

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        return [Guard(self.secret)] if self.secret else []


class Guard(grpc.aio.ServerInterceptor):
    """Rejects calls without the secret."""

    def __init__(self, secret: str) -> None:
        self._expected = f"Bearer {secret}".encode()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(_GUARDED) or self._is_authorized(details):
            return handler
        make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_unary_rpc_method_handler
        return make(_reject, handler.request_deserializer, handler.response_serializer)

    def _is_authorized(self, details: grpc.HandlerCallDetails) -> bool:
        shown = next((value for name, value in details.invocation_metadata or () if name == "authorization"), "")
        return hmac.compare_digest(str(shown).encode(), self._expected)


async def _reject(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this shard requires its secret (--shard-secret-file)")


def read_secret(path: Path) -> str:
    """Raises ValueError for a secret that is too short, OSError if there is no file."""
    secret = path.read_text().strip()
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(f"the secret in {path} has fewer than {SHORTEST_SECRET} characters")
    return secret

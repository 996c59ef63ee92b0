"""Credentials of calls to shards: none over a Unix socket; over TCP a shared secret, TLS, or both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from lorikeet.router.config import RouterConfig

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ShardAccess:
    """For every shard of one router."""

    secret: str = ""
    credentials: grpc.ChannelCredentials | None = None

    @classmethod
    def of(cls, config: RouterConfig) -> Self:
        """Raises OSError where a file cannot be read."""
        secret = "" if config.shard_secret_path is None else Path(config.shard_secret_path).read_text().strip()
        if config.shard_tls_ca_path is None:
            return cls(secret)
        paths = (config.shard_tls_ca_path, config.shard_tls_key_path, config.shard_tls_cert_path)
        files = [None if path is None else Path(path).read_bytes() for path in paths]
        return cls(secret, grpc.ssl_channel_credentials(*files))

    def channel(self, address: str, name: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """To a shard whose certificate is for `name`; "" for the address's own name."""
        if self.credentials is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", name)] if name else options
        return grpc.aio.secure_channel(address, self.credentials, options=named)

    def metadata(self, address: str) -> Metadata:
        """Sent with each call."""
        return () if address.startswith("unix:") or not self.secret else (("authorization", f"Bearer {self.secret}"),)


OPEN = ShardAccess()
"""For Unix sockets."""

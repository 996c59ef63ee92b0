"""The HTTP server: Uvicorn with our protocol, without signal handlers and without any trust in proxies' headers."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lorikeet.router.config import RouterConfig
from lorikeet.router.http.address import Addresses
from lorikeet.router.http.protocol import Connections, Protocol

FLUSH_TIMEOUT_S = 5
"""How long connections may take to flush after the last generation has ended."""
LEAVING_KEEP_ALIVE_S = 5.0
"""How long an idle connection stays open once another router has taken over."""


class HttpServer(uvicorn.Server):
    """Serves one application."""

    def __init__(
        self, app: ASGIApp, config: RouterConfig, on_rejected: Callable[[str], None] = lambda _: None, **options: Any
    ) -> None:
        """`on_rejected` is called with the reason of an answer that no route gives; `options` are Uvicorn's.

        Raises ValueError where a trusted proxy is no network.
        """
        self.connections = Connections(
            Addresses(config.trusted_proxies, hashed=config.hash_client_addresses),
            config.header_timeout_s,
            config.keep_alive_timeout_s,
            config.max_connections_per_address,
            on_rejected,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Protocol, self.connections),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=4096,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
                lifespan="off",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
                **options,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No handlers: the router's drain first."""
        yield

    def leave(self) -> None:
        """Another router serves new connections: idle ones here end soon."""
        self.connections.keep_alive_timeout_s = LEAVING_KEEP_ALIVE_S
        for connection in list(self.server_state.connections):
            if isinstance(connection, Protocol):
                connection.leave(LEAVING_KEEP_ALIVE_S)

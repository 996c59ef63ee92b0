"""What the connections of a server share: their limits, their number per client address, and log lines."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from lorikeet.router.http.address import Addresses, identity

MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of a request line with header fields, and of everything else between two parts of a body."""
MAX_HEADER_FIELDS = 100
"""Maximum fields of a head, and of trailers."""

_log = structlog.get_logger(__name__)


@dataclass
class Connections:
    """Connections of one server."""

    addresses: Addresses = field(default_factory=Addresses)
    header_timeout_s: float = 10.0
    keep_alive_timeout_s: float = 75.0
    max_per_address: int = 0
    """0 is no limit."""
    on_rejected: Callable[[str], None] = lambda _: None
    """Called with the reason of an answer that no route gives."""
    _counts: Counter[str] = field(default_factory=Counter)
    _refused: set[str] = field(default_factory=set)
    """Addresses at the limit that were logged."""

    def open(self, peer: str) -> bool:
        """Count a connection from `peer`; False where that would be too many."""
        address = identity(peer)
        if self._is_over(peer, address):
            if address not in self._refused:
                self._refused.add(address)
                _log.warning("connections_refused", client=self.shown(peer), limit=self.max_per_address)
            return False
        self._counts[address] += 1
        return True

    def shown(self, peer: str) -> str:
        """`peer` as log lines show it."""
        return self.addresses.shown(identity(peer))

    def _is_over(self, peer: str, address: str) -> bool:
        is_limited = self.max_per_address and address and not self.addresses.is_trusted(peer)
        return bool(is_limited) and self._counts[address] >= self.max_per_address

    def close(self, peer: str) -> None:
        """A counted connection is closed."""
        address = identity(peer)
        self._counts[address] -= 1
        self._refused.discard(address)
        if self._counts[address] <= 0:
            del self._counts[address]

"""The address of a client: that of the connection, or the one that a trusted proxy reports.

IPv6 clients own at least a /64, so they are identified by it.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.types import Scope

_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*("[^"]*"|[^;]*)', re.IGNORECASE)
_WITH_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[^:]*)(?::\d+)?")


_LONGEST = 64
"""Characters of an address with a zone. A header may be longer, and must not be kept."""


class Addresses:
    """Resolves the address of each request. `trusted` are the networks of proxies whose headers are believed."""

    def __init__(self, trusted: Iterable[str] = (), *, hashed: bool = False) -> None:
        """`hashed`: log lines get hashes. Raises ValueError for a text that is no network in CIDR notation."""
        self._hash_key = secrets.token_bytes(16) if hashed else None
        self._trusted: tuple[IPv4Network | IPv6Network, ...] = tuple(map(ip_network, trusted))

    def is_trusted(self, address: str) -> bool:
        """Whether a connection from `address` is one of a trusted proxy."""
        parsed = _parsed(address) if self._trusted else None
        return parsed is not None and any(parsed in network for network in self._trusted)

    def of(self, scope: Scope) -> str:
        """The client's IPv4 address or IPv6 network of a request; empty for a connection without an address."""
        client = scope.get("client")
        peer: str = client[0] if client else ""
        if self._trusted and self.is_trusted(peer):
            peer = self._forwarded(scope["headers"], peer)
        return identity(peer)

    def shown(self, address: str) -> str:
        """`address` for a log line: as it is, or a hash under a key that only this process knows."""
        if self._hash_key is None or not address:
            return address
        return hashlib.blake2b(address.encode(), digest_size=8, key=self._hash_key).hexdigest()

    def _forwarded(self, headers: Iterable[tuple[bytes, bytes]], peer: str) -> str:
        """The last address that no trusted proxy has. Two headers that disagree are not believed.

        A proxy sets one header and may pass the other one on as the client wrote it.
        """
        found = set[str]()
        for name, read in _READERS.items():
            text = ",".join(value.decode("latin-1") for key, value in headers if key == name)
            if text:
                found.add(self._outermost(read(text), peer))
        return found.pop() if len(found) == 1 else peer

    def _outermost(self, hops: Iterator[str], peer: str) -> str:
        """`hops` come from the nearest to the farthest; only those that trusted proxies have reported count."""
        for hop in hops:
            if _parsed(hop) is None:
                break
            peer = hop
            if not self.is_trusted(hop):
                break
        return peer


def _of_x_forwarded_for(text: str) -> Iterator[str]:
    for part in reversed(text.split(",")):
        yield _without_port(part)


def _of_forwarded(text: str) -> Iterator[str]:
    """RFC 7239's `for`."""
    for part in reversed(text.split(",")):
        found = _FOR.search(part)
        yield _without_port(found[1].strip().strip('"')) if found else ""


_READERS = {b"x-forwarded-for": _of_x_forwarded_for, b"forwarded": _of_forwarded}


def _without_port(text: str) -> str:
    """`1.2.3.4:80`, `[::1]:80` and `::1` without the port."""
    text = text.strip()
    if text.count(":") > 1 and not text.startswith("["):
        return text
    found = _WITH_PORT.fullmatch(text)
    return "" if found is None else found["six"] or found["four"] or ""


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """None where `text` is no address. IPv4 addresses in IPv6 notation become IPv4."""
    return _parsed_short(text) if len(text) <= _LONGEST else None


@lru_cache(maxsize=4096)
def _parsed_short(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(maxsize=4096)
def identity(address: str) -> str:
    """What a limit per client counts by: an IPv4 address, the /64 of an IPv6 address, or the text as it is."""
    parsed = _parsed(address)
    if parsed is None:
        return address
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    return str(IPv6Network((int(parsed) >> 64 << 64, 64)))

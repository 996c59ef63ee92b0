"""The caller of a request: the bearer token, or the API key that it matches, its address, and the salt of its cached
prefixes.
"""

from dataclasses import dataclass, field

from starlette.requests import Request

from lorikeet.adapters.keys import Key, Keys


@dataclass(frozen=True)
class Caller:
    """Of one request."""

    request_id: str
    key: Key | None = None
    """The server's own API key that it sent."""
    token: str | None = field(default=None, repr=False)
    """Any other bearer token, for example of a source."""
    address: str = ""
    """The client's IPv4 address or IPv6 /64, resolved through trusted proxies; empty where there is none."""

    @property
    def identity(self) -> str:
        """What limits and turns per caller count by: the key, else the address."""
        return f"key:{self.key.name}" if self.key is not None else f"address:{self.address}"

    @property
    def cache_salt(self) -> str:
        """Requests share cached prefixes only under equal salts."""
        return f"key:{self.key.name}" if self.key is not None and self.key.isolate else ""


def caller(request: Request, keys: Keys) -> Caller:
    """The caller of `request`, by the keys in force at the first call."""
    found: Caller | None = getattr(request.state, "caller", None)
    if found is None:
        token = bearer(request)
        key = keys.find(token)
        address = getattr(request.state, "address", "")
        request.state.caller = found = Caller(
            request.state.request_id, key, None if key is not None else token, address
        )
    return found


def bearer(request: Request) -> str | None:
    """The token of the Authorization header."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None

"""The caller of a request: the bearer token, or the API key that it matches, its address, and the salt of its cached
prefixes.
"""

import hashlib
from dataclasses import dataclass, field

from starlette.requests import Request

from lorikeet.adapters.keys import Key, Keys

KEY_HEADER = "x-api-key"


@dataclass(frozen=True)
class Caller:
    """Caller of one request."""

    request_id: str
    key: Key | None = None
    """The server's own API key that it sent."""
    token: str | None = field(default=None, repr=False)
    """A bearer token that is not one, for example of a source."""
    address: str = ""
    """The client's IPv4 address or IPv6 /64, resolved through trusted proxies; empty where there is none."""
    is_foreign_page: bool = False
    """Whether a page of another site sent it, without a key."""

    @property
    def identity(self) -> str:
        """What limits and turns per caller count by: the key, else the address."""
        return f"key:{self.key.name}" if self.key is not None else f"address:{self.address}"

    @property
    def share(self) -> float:
        """The caller's weight next to other callers."""
        return 1.0 if self.key is None else self.key.weight

    def cache_salt(self, salt: str | None) -> str:
        """Requests share cached prefixes only under equal salts. `salt` is that of the request."""
        own = f"key:{self.key.name}" if self.key is not None and self.key.isolate else ""
        return own if salt is None else f"{own}\0{salt}"

    def tenant(self, salt: str | None) -> str:
        """An opaque id; outputs are proposed as drafts to requests of the same tenant only. It is of the key's name;
        without a key, of the request's `salt`. Empty for a key that is marked `isolate`.
        """
        if self.key is not None and self.key.is_marked_isolate:
            return ""
        name = f"salt:{salt or ''}" if self.key is None else f"key:{self.key.name}"
        return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]


def caller(request: Request, keys: Keys) -> Caller:
    """The caller of `request`, by the keys in force at the first call."""
    sender: Caller | None = getattr(request.state, "caller", None)
    if sender is None:
        token = bearer(request)
        if (key := keys.find(token)) is not None:
            token = None
        else:
            key = keys.find(request.headers.get(KEY_HEADER))
        address = getattr(request.state, "address", "")
        is_foreign = key is None and getattr(request.state, "is_foreign", False)
        request.state.caller = sender = Caller(request.state.request_id, key, token, address, is_foreign)
    return sender


def offered(request: Request) -> tuple[str | None, str | None]:
    """What a request presents: in KEY_HEADER, and as the token of the Authorization header."""
    return request.headers.get(KEY_HEADER) or None, bearer(request)


def bearer(request: Request) -> str | None:
    """The token of the Authorization header."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None

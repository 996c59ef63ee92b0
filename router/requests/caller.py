"""Who asks: the bearer's token, or the API key that it is, and what makes a request its own. Knows no adapter."""

from dataclasses import dataclass, field

from starlette.requests import Request

from lorikeet.adapters.keys import Key, Keys


@dataclass(frozen=True)
class Caller:
    """Of one request."""

    request_id: str
    key: Key | None = None
    """The server's own key that it showed."""
    token: str | None = field(default=None, repr=False)
    """What it showed instead: a source's token, perhaps."""

    @property
    def cache_salt(self) -> str:
        """Prefixes are shared under equal salts only."""
        return f"key:{self.key.name}" if self.key is not None and self.key.isolate else ""


def caller(request: Request, keys: Keys) -> Caller:
    """Who sent `request`, by the keys that hold when this is first asked."""
    found: Caller | None = getattr(request.state, "caller", None)
    if found is None:
        token = bearer(request)
        key = keys.find(token)
        request.state.caller = found = Caller(request.state.request_id, key, None if key is not None else token)
    return found


def bearer(request: Request) -> str | None:
    """The token of the Authorization header."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None

"""Who may call: API keys, the limits of each key and on failed keys, and what pages in browsers may do.

A server with API keys is protected by them. One without trusts whoever reaches it, and a browser lets any page send
requests to the servers of its machine. There a page may read answers only if its site is listed, is this server, or is
on the machine itself. A site whose name resolves to the machine would be this server for the browser, so on loopback
connections the name counts.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorikeet.adapters.keys import Key
from lorikeet.router.adapters.selection import Selection
from lorikeet.router.api.pages import is_page
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import (
    ForeignPage,
    HostNotAllowed,
    KeyLimitReached,
    KeyRequired,
    TooManyFailedKeys,
    TwoCredentials,
)
from lorikeet.router.http_protocol import Addresses, header, parsed_address
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import caller, offered

MAX_FAILURES = 20
"""Wrong credentials of one address per FAILURE_S; above it the answer to them is 429. A valid key is never limited:
behind one address there may be many clients.
"""
FAILURE_S = 60.0
_MAX_ADDRESSES = 65_536
PROBES = frozenset(("/health", "/healthz", "/livez", "/ping", "/ready", "/readyz", "/startup", "/health_generate"))
"""Paths that tell whether the server works."""
_OPEN = PROBES | {"/docs", "/openapi.json", "/api-doc/openapi.json"}
_OPEN_FOLDER = "/docs/assets/"


class Authentication:
    """Authentication of one router's requests; the keys in force are those of `selection`."""

    def __init__(self, config: RouterConfig, selection: Selection) -> None:
        self._selection = selection
        self._is_closed = config.has_keys and not config.keys_optional
        self._open = _OPEN | ({"/metrics"} if config.metrics_without_key else set())
        self._failures = _Failures()

    def check(self, request: Request) -> None:
        """Raises KeyRequired, TwoCredentials or TooManyFailedKeys for a request that the server does not admit."""
        path = request.scope["path"]
        if self._is_closed and not (path in self._open or path.startswith(_OPEN_FOLDER) or is_page(request)):
            self._checked(request, KeyRequired())

    def check_admin(self, request: Request, refusal: Exception) -> None:
        """Raises `refusal` for all but administrators, or TooManyFailedKeys."""
        key = self._checked(request, refusal)
        if not key.admin:
            raise refusal

    def _checked(self, request: Request, refusal: Exception) -> Key:
        """The key of a request. Every credential that it presents must be right, wherever it stands."""
        keys, credentials = self._selection.keys, offered(request)
        header, token = credentials
        key = caller(request, keys).key
        is_pair = header is not None and token is not None and header != token
        if is_pair and keys.find(header) is not None and self._selection.is_for_source(token or ""):
            is_pair, credentials = False, (header, None)
        if is_pair or any(credential is not None and keys.find(credential) is None for credential in credentials):
            self._failures.add(getattr(request.state, "address", ""))
            raise TwoCredentials() if is_pair else refusal
        if key is None:
            raise refusal
        return key


class _Failures:
    """Times of wrong credentials by address; the least recent addresses are forgotten above _MAX_ADDRESSES."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, list[float]] = OrderedDict()

    def add(self, address: str) -> None:
        """Record one. Raises TooManyFailedKeys."""
        now = time.monotonic()
        times = [at for at in self._times.get(address, ()) if now - at < FAILURE_S]
        if len(times) >= MAX_FAILURES:
            raise TooManyFailedKeys(FAILURE_S - (now - times[0]))
        self._times[address] = [*times, now]
        self._times.move_to_end(address)
        if len(self._times) > _MAX_ADDRESSES:
            self._times.popitem(last=False)


@dataclass
class _Bucket:
    """What a rate per minute leaves; it starts full and may go below zero."""

    level: float | None = None
    at: float = 0.0

    def refill(self, per_minute: float, now: float) -> float:
        """The level at `now`."""
        level = per_minute if self.level is None else self.level + (now - self.at) * per_minute / 60
        self.level, self.at = min(per_minute, level), now
        return self.level


@dataclass
class _Spent:
    """Requests and tokens that one key may still spend, and its running requests."""

    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    num_running: int = 0


class KeyLimits:
    """Counts generation requests and their tokens by the name of the key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[str, _Spent] = {}

    def begin(self, key: Key) -> None:
        """Count a request, which must be followed by `end`. Raises KeyLimitReached."""
        spent, now = self._spent.setdefault(key.name, _Spent()), self._clock()
        if key.concurrency is not None and spent.num_running >= key.concurrency:
            raise KeyLimitReached(f"{key.concurrency} requests at a time", 1.0)
        if (rate := key.tokens_per_minute) is not None and (level := spent.tokens.refill(rate, now)) <= 0:
            raise KeyLimitReached(f"{rate:g} tokens per minute", 1.0 - level * 60 / rate)
        if (rate := key.requests_per_minute) is not None:
            level = spent.requests.refill(rate, now)
            if level < min(1.0, rate):
                raise KeyLimitReached(f"{rate:g} requests per minute", (min(1.0, rate) - level) * 60 / rate)
            spent.requests.level = level - 1
        spent.num_running += 1

    def end(self, key: Key, generations: Iterable[Generation]) -> None:
        """Count the tokens of a request: each prompt once, and every output."""
        spent, prompts, num_tokens = self._spent[key.name], set[int](), 0
        for generation in generations:
            num_tokens += generation.num_generated
            if id(generation.request.prompt_ids) not in prompts:
                prompts.add(id(generation.request.prompt_ids))
                num_tokens += len(generation.request.prompt_ids)
        spent.num_running -= 1
        if key.tokens_per_minute is not None:
            spent.tokens.level = spent.tokens.refill(key.tokens_per_minute, self._clock()) - num_tokens


_METHODS = ("GET", "POST")
_ANY = "*"
_LOOPBACK_ORIGIN = re.compile(r"https?://(localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(:\d+)?")
_WORKS_FOR_READERS = frozenset(("/startup", "/health_generate", "/v1/live"))
"""Paths where a GET makes the model or the shards work: a page can send one without reading the answer."""


class Browsers:
    """The rules of one router."""

    def __init__(self, config: RouterConfig, addresses: Addresses) -> None:
        """Raises ValueError for rules that would let any site use a visitor's credentials."""
        self._addresses = addresses
        self._has_keys = config.has_keys and not config.keys_optional
        self._listed = frozenset(origin.lower() for origin in config.cors_allow_origin) - {_ANY}
        self._hosts = frozenset(host.lower().strip("[]") for host in (*config.allowed_hosts, config.hostname))
        origins = config.cors_allow_origin or ((_ANY,) if self._has_keys else ())
        if config.cors_allow_credentials and (not config.cors_allow_origin or _ANY in origins):
            raise ValueError("cors_allow_credentials needs cors_allow_origin: else any site could use a visitor's")
        self._options = {
            "allow_methods": config.cors_allow_method or _METHODS,
            "allow_headers": config.cors_allow_header or (_ANY,),
            "expose_headers": config.cors_expose_header,
            "allow_credentials": bool(config.cors_allow_credentials),
        }
        has_list = bool(config.cors_allow_origin) or self._has_keys
        pattern = None if has_list else _LOOPBACK_ORIGIN.pattern
        self._rules = self._cors(origins, pattern)
        self._allows_own = not has_list

    def check(self, scope: Scope) -> None:
        """Record in the request's state whether another site's page sent it. Raises HostNotAllowed or ForeignPage."""
        self._check_host(scope)
        is_foreign = scope["state"]["is_foreign"] = self._is_foreign(scope)
        if is_foreign and not self._has_keys and scope["path"] in _WORKS_FOR_READERS:
            raise ForeignPage()

    def cors_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """CORS headers to add to an answer."""
        origin, rules = header(scope, b"origin"), self._rules
        depends = [] if rules.allow_all_origins else [(b"vary", b"Origin")]
        if origin is None:
            return depends
        simple = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in rules.simple_headers.items()
        ]
        if rules.allow_all_origins or not self._rules_for(origin, scope).is_allowed_origin(origin):
            return [*simple, *depends]
        return [*simple, (b"access-control-allow-origin", origin.encode("latin-1")), *depends]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a preflight request, None for any other request."""
        if scope["method"] != "OPTIONS":
            return None
        headers = Headers(scope=scope)
        if "origin" not in headers or "access-control-request-method" not in headers:
            return None
        return self._rules_for(headers["origin"], scope).preflight_response(headers)

    def _rules_for(self, origin: str, scope: Scope) -> CORSMiddleware:
        is_own = self._allows_own and self._is_own(origin, scope)
        return self._cors((origin,), None) if is_own else self._rules

    def _cors(self, origins: tuple[str, ...], pattern: str | None) -> CORSMiddleware:
        return CORSMiddleware(_nothing, allow_origins=origins, allow_origin_regex=pattern, **self._options)  # type: ignore[arg-type]

    def _check_host(self, scope: Scope) -> None:
        if self._has_keys or _ANY in self._hosts or not _is_loopback((scope.get("server") or ("",))[0]):
            return
        if self._is_behind_proxy(scope):
            return
        for key, value in scope["headers"]:
            if key != b"host":
                continue
            host = value.decode("latin-1")
            name = host_name(host)
            if name != "localhost" and not _is_loopback(name) and name not in self._hosts:
                raise HostNotAllowed(host)

    def _is_foreign(self, scope: Scope) -> bool:
        """Whether a page of another site sent the request, as far as browsers say it."""
        origin = header(scope, b"origin")
        if origin is None:
            is_elsewhere = header(scope, b"sec-fetch-site") in ("cross-site", "same-site")
            return is_elsewhere and header(scope, b"sec-fetch-mode") != "navigate"
        if origin.lower() in self._listed or _LOOPBACK_ORIGIN.fullmatch(origin.lower()):
            return False
        return not self._is_own(origin, scope)

    def _is_own(self, origin: str, scope: Scope) -> bool:
        host = header(scope, b"x-forwarded-host") if self._is_behind_proxy(scope) else None
        return origin.lower().partition("://")[2] == (host or header(scope, b"host") or "").lower() != ""

    def _is_behind_proxy(self, scope: Scope) -> bool:
        return self._addresses.is_trusted((scope.get("client") or ("",))[0])


def host_name(host: str) -> str:
    """The name or address in a `Host` field, in lower case and without its port, brackets and last dot."""
    host = host.strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.removesuffix(".")


def _is_loopback(address: str) -> bool:
    parsed = parsed_address(address)
    return parsed is not None and parsed.is_loopback


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of the rules, which is never called."""

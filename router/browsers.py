"""What pages in browsers may do: CORS, the names in `Host`, and requests of pages of other sites.

A server with API keys is protected by them. One without trusts whoever reaches it, and a browser lets any page send
requests to the servers of its machine. There a page may read answers only if its site is listed, is this server, or is
on the machine itself. A site whose name resolves to the machine would be this server for the browser, so on loopback
connections the name counts.
"""

import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ForeignPage, HostNotAllowed
from lorikeet.router.http_protocol import Addresses, parsed_address

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
        headers = Headers(scope=scope)
        self._check_host(scope, headers)
        is_foreign = scope["state"]["is_foreign"] = self._is_foreign(scope, headers)
        if is_foreign and not self._has_keys and scope["path"] in _WORKS_FOR_READERS:
            raise ForeignPage()

    def cors_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """CORS headers to add to an answer."""
        headers = Headers(scope=scope)
        origin, rules = headers.get("origin"), self._rules
        depends = [] if rules.allow_all_origins else [(b"vary", b"Origin")]
        if origin is None:
            return depends
        simple = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in rules.simple_headers.items()
        ]
        if rules.allow_all_origins or not self._rules_for(origin, scope, headers).is_allowed_origin(origin):
            return [*simple, *depends]
        return [*simple, (b"access-control-allow-origin", origin.encode("latin-1")), *depends]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a preflight request, None for any other request."""
        if scope["method"] != "OPTIONS":
            return None
        headers = Headers(scope=scope)
        if "origin" not in headers or "access-control-request-method" not in headers:
            return None
        return self._rules_for(headers["origin"], scope, headers).preflight_response(headers)

    def _rules_for(self, origin: str, scope: Scope, headers: Headers) -> CORSMiddleware:
        is_own = self._allows_own and self._is_own(origin, scope, headers)
        return self._cors((origin,), None) if is_own else self._rules

    def _cors(self, origins: tuple[str, ...], pattern: str | None) -> CORSMiddleware:
        return CORSMiddleware(_nothing, allow_origins=origins, allow_origin_regex=pattern, **self._options)  # type: ignore[arg-type]

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        if self._has_keys or _ANY in self._hosts or not _is_loopback((scope.get("server") or ("",))[0]):
            return
        if self._is_behind_proxy(scope):
            return
        for host in headers.getlist("host"):
            name = host_name(host)
            if name != "localhost" and not _is_loopback(name) and name not in self._hosts:
                raise HostNotAllowed(host)

    def _is_foreign(self, scope: Scope, headers: Headers) -> bool:
        """Whether a page of another site sent the request, as far as browsers say it."""
        origin = headers.get("origin")
        if origin is None:
            is_elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            return is_elsewhere and headers.get("sec-fetch-mode") != "navigate"
        if origin.lower() in self._listed or _LOOPBACK_ORIGIN.fullmatch(origin.lower()):
            return False
        return not self._is_own(origin, scope, headers)

    def _is_own(self, origin: str, scope: Scope, headers: Headers) -> bool:
        host = headers.get("x-forwarded-host") if self._is_behind_proxy(scope) else None
        return origin.lower().partition("://")[2] == (host or headers.get("host", "")).lower() != ""

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

"""The outermost ASGI middleware: request ids, client addresses, spellings of paths, CORS, rejection while draining, log
lines, metrics, usage, unexpected errors.

It calls the generation routes directly, without the framework's layers: each layer costs a stream one call and one
resumption per token.
"""

import asyncio
import enum
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorikeet.router.api.access import PROBES, Browsers
from lorikeet.router.api.answer_parts import request_id
from lorikeet.router.api.prepare import now
from lorikeet.router.api.service import Service
from lorikeet.router.api.streaming import Buffered, ClientGone, Replay, event, forward, named_event, wanted_ttl
from lorikeet.router.error_answers import answer, anthropic_body, failure_headers, lorax_body, openai_body, reason
from lorikeet.router.errors import (
    AdminOnly,
    BodyRejected,
    GenerationFailed,
    InternalError,
    KeyRequired,
    RouterError,
    ShuttingDown,
    TooManyFailedKeys,
)
from lorikeet.router.http_protocol import Addresses, header
from lorikeet.router.kept_streams import KeptStream
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.usage_log import Ending


class ErrorStyle(enum.Enum):
    """Whose shape an error has."""

    LORAX = enum.auto()
    OPENAI = enum.auto()
    ANTHROPIC = enum.auto()


_ANTHROPIC_PATH = "/v1/messages"
_OPENAI_PATHS = ("/v1/", "/v2/", "/detokenize", "/tokenizer_info", "/adapters", "/pooling", "/score", "/rerank")


def style_of(scope: Scope) -> ErrorStyle:
    """By the path, unless the route has set `state.error_style`, because it serves several APIs."""
    style: ErrorStyle | None = scope.get("state", {}).get("error_style")
    return style or style_of_path(scope["path"])


def style_of_path(path: str) -> ErrorStyle:
    """Error style of the API that `path` belongs to."""
    if path.startswith(_ANTHROPIC_PATH):
        return ErrorStyle.ANTHROPIC
    return ErrorStyle.OPENAI if path.startswith(_OPENAI_PATHS) else ErrorStyle.LORAX


def failure_response(error: RouterError, scope: Scope) -> Response:
    """LoRAX's routes answer an unreadable body with plain text."""
    style = style_of(scope)
    row = answer(error)
    headers = failure_headers(error)
    if style is ErrorStyle.OPENAI:
        return Response(orjson.dumps(openai_body(error)), row.openai_status, headers, "application/json")
    if style is ErrorStyle.ANTHROPIC:
        body = anthropic_body(error) | {"request_id": scope["state"]["request_id"]}
        return Response(orjson.dumps(body), row.openai_status, headers, "application/json")
    if isinstance(error, BodyRejected):
        return PlainTextResponse(str(error), row.status, headers)
    return Response(orjson.dumps(lorax_body(error)), row.status, headers, "application/json")


def failure_event(error: RouterError, scope: Scope) -> bytes:
    """The error as the last event of a stream."""
    style = style_of(scope)
    if style is ErrorStyle.ANTHROPIC:
        return named_event(anthropic_body(error))
    return event(openai_body(error) if style is ErrorStyle.OPENAI else lorax_body(error))


if TYPE_CHECKING:
    from lorikeet.router.request_tracing import RequestTrace

_STREAMS = "/v1/streams/"
_OPEN_WHILE_DRAINING = PROBES | {"/metrics", "/info"}

_SLASHES = re.compile("/{2,}")
_MODEL_ROUTE = "/v1/models/"
_EVENTS = "text/event-stream"

_ALWAYS_LOGGED = (KeyRequired, TooManyFailedKeys, AdminOnly)

CLIENT_CLOSED_REQUEST = 499
"""The logged status of a request whose client disconnected before the answer."""

Handle = Callable[[Request], Awaitable[Response]]

_log = structlog.get_logger(__name__)


class RequestMiddleware:
    """Wraps the application; `generating` are the POST routes to the model, which it counts and calls directly."""

    def __init__(self, app: ASGIApp, generating: Mapping[str, Handle], service: Service, metrics: Metrics) -> None:
        """Raises ValueError for rules of CORS that would let any site use a visitor's credentials."""
        self._app = app
        self._addresses = Addresses(service.config.trusted_proxies, hashed=service.config.hash_client_addresses)
        self._browsers = Browsers(service.config, self._addresses)
        self._generating = generating
        self._service = service
        self._metrics = metrics
        self._usage = service.usage
        self._tracing = service.tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = request_id(header(scope, b"x-request-id"))
        scope["path"] = normal_path(scope["path"], self._service.config.root_path)
        state = scope.setdefault("state", {})
        state["request_id"], state["address"] = identity, self._addresses.of(scope)
        preflight = self._browsers.preflight(scope)
        cors = [] if preflight is not None else self._browsers.cors_headers(scope)
        call = _RequestScope(scope, send, cors)
        call.client = self._addresses.shown(state["address"])
        if self._service.dispatcher.is_leaving:  # so that the next request goes to another router
            call.headers.append((b"connection", b"close"))
        handle = self._generating.get(scope["path"]) if scope["method"] == "POST" else None
        ids = {"request_id": identity}
        if handle is not None:
            self._metrics.request_arrived()
            if self._tracing is not None and (trace := self._tracing.begin(scope)) is not None:
                state["trace"] = call.trace = trace
                ids["trace_id"] = trace.trace_id
        with structlog.contextvars.bound_contextvars(**ids):
            try:
                if preflight is not None:
                    await preflight(scope, receive, call.send)
                else:
                    await self._answer(scope, receive, call, handle)
            finally:
                if (charge := state.get("body_charge")) is not None:
                    charge.shrink(0)
                for generation in state.get("generations", ()):
                    generation.charge.release()
                ending = call.finish()
                if handle is not None:
                    if ending.error is None:
                        self._metrics.request_succeeded(ending.ended_at - ending.began_at)
                    else:
                        self._metrics.request_failed(ending.error)
                        self._service.failures.add(ending.error, ending.status)
                    self._usage.ended(Request(scope), ending)
                    if call.trace is not None:
                        call.trace.end(scope, call.client, ending)

    async def _answer(self, scope: Scope, receive: Receive, call: "_RequestScope", direct: Handle | None) -> None:
        """Answer by calling `direct`, or the framework where it is None; failures become answers."""
        try:
            if self._service.dispatcher.draining and not _stays_open(scope):
                raise ShuttingDown()
            request = Request(scope, receive)
            self._browsers.check(scope)
            self._service.authentication.check(request)
            if direct is None:
                await self._app(scope, receive, call.send)
                return
            await self._service.dispatcher.known()
            if (ttl_s := wanted_ttl(scope)) is None:
                await self._generate(request, direct, receive, call.send)
            else:
                owner, stream_id = self._service.caller(request).identity, scope["state"]["request_id"]
                stream = self._service.streams.begin(owner, stream_id, ttl_s)
                await self._generate_kept(stream, scope, receive, call, direct)
        except BaseException as error:
            await self._fail(error, receive, call)

    async def _generate(self, request: Request, direct: Handle, receive: Receive, send: Send) -> None:
        """Call a route to the model, within the limits of the caller's key."""
        if (key := self._service.caller(request).key) is None:
            await (await direct(request))(request.scope, receive, send)
            return
        self._service.key_limits.begin(key)
        try:
            await (await direct(request))(request.scope, receive, send)
        finally:
            self._service.key_limits.end(key, request.scope["state"].get("generations", ()))

    async def _generate_kept(
        self, stream: KeptStream, scope: Scope, receive: Receive, call: "_RequestScope", direct: Handle
    ) -> None:
        """Call a route to the model into a stream, which the client reads while it is connected."""
        buffered = Buffered(stream, self._service.streams, receive)
        call.divert(buffered.send)
        forwarding = asyncio.create_task(forward(Replay(stream), scope, receive, call.send))
        try:
            try:
                await self._generate(Request(scope, buffered.receive), direct, buffered.receive, call.answer)
            except BaseException as error:
                await self._fail(error, buffered.receive, call)
            if stream.cancelled.is_set():
                _add_cancellation(stream, scope)
            stream.finish()
            await forwarding
        finally:
            stream.finish()
            forwarding.cancel()
        if stream.cancelled.is_set():
            call.status = CLIENT_CLOSED_REQUEST

    async def _fail(self, error: BaseException, receive: Receive, call: "_RequestScope") -> None:
        """Answer with an error, which is logged where it is unexpected. Raises what ends the process."""
        if isinstance(error, RouterError):
            await call.fail(error, receive)
        elif isinstance(error, ClientGone | ClientDisconnect):
            call.status = CLIENT_CLOSED_REQUEST
        elif isinstance(error, asyncio.CancelledError):  # the server ends, and this request was not complete
            await call.fail(ShuttingDown(), receive)
        elif isinstance(error, Exception):
            # The exception's text and locals may hold a prompt, so neither is logged.
            frames = traceback.extract_tb(error.__traceback__)
            where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
            _log.error("unhandled_exception", kind=type(error).__name__, where=where)
            await call.fail(InternalError(), receive)
        else:
            raise error


def _add_cancellation(stream: KeptStream, scope: Scope) -> None:
    """What other readers of a cancelled stream get as its end."""
    error = GenerationFailed("the request was cancelled")
    if not stream.status:
        response = failure_response(error, scope)
        stream.begin(response.status_code, response.raw_headers)
        stream.add(bytes(response.body))
    elif stream.is_events:
        stream.add(failure_event(error, scope))


def _stays_open(scope: Scope) -> bool:
    return (
        scope["path"] in _OPEN_WHILE_DRAINING
        or scope["path"].startswith(_STREAMS)
        or (scope["path"] == "/" and scope["method"] == "GET")
    )


def normal_path(path: str, root: str = "") -> str:
    """Without `root`, which a reverse proxy may leave in the path, and without trailing and doubled slashes, except in
    the id of a model, which may be an absolute path.
    """
    path = path.rstrip("/") or "/"
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :] or "/"
    return path if path.startswith(_MODEL_ROUTE) else _SLASHES.sub("/", path)


class _RequestScope:
    """One request: adds headers to the response and records the status."""

    def __init__(self, scope: Scope, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._scope = scope
        self._send = send
        self._diverted: Send | None = None
        self.headers = headers
        """To add to the response, with the request's id."""
        self.client = ""
        """The client's address, as the log shows it."""
        self._began_at = now()
        self.status = 0
        self.trace: RequestTrace | None = None
        """None where the request is not traced."""

    def send(self, message: Message) -> Awaitable[None]:
        """Not a coroutine function, because it is called for every token."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            identity = self._scope["state"]["request_id"].encode()
            message["headers"] = [*message.get("headers", []), (b"x-request-id", identity), *self.headers]
            if style_of(self._scope) is ErrorStyle.ANTHROPIC:
                message["headers"].append((b"request-id", identity))
            if self.trace is not None:
                self.trace.is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(_EVENTS)
        return self._send(message)

    def divert(self, send: Send) -> None:
        """The answer goes to `send`, and from there to the client."""
        self._diverted = send

    def answer(self, message: Message) -> Awaitable[None]:
        """Send a part of the answer to where it goes first."""
        if self._diverted is None:
            return self.send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        return self._diverted(message)

    async def fail(self, error: RouterError, receive: Receive) -> None:
        """Answer with `error`, unless an answer has begun."""
        self._scope["state"]["failure"] = error
        if not self.status:
            await failure_response(error, self._scope)(self._scope, receive, self.answer)

    def finish(self) -> Ending:
        """Log the request; returns how it ended, with the error as metrics count it."""
        method, path, state = self._scope["method"], self._scope["path"], self._scope["state"]
        failure = state.get("failure")
        error = "dropped" if self.status == CLIENT_CLOSED_REQUEST else failure and answer(failure).counted_as
        ending = Ending(path, self.status, error, self._began_at, now())
        seconds, fields = round(ending.ended_at - ending.began_at, 6), dict(state.get("log_fields", {}))
        if failure is not None:
            fields["reason"] = reason(failure)
        write = _log.debug if method == "GET" and not isinstance(failure, _ALWAYS_LOGGED) else _log.info
        fields = {"client": self.client, **fields}
        write("request", method=method, path=path[:128], status=self.status, seconds=seconds, **fields)
        if failure is not None:  # its frames hold the request, which holds it: only a later collection would free both
            failure.__traceback__ = failure.__context__ = failure.__cause__ = None
        return ending

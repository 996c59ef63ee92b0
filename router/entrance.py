"""What every request passes first: its id, the closed door while draining, its log line and count, a net for bugs.

Pure ASGI, so that a stream pays one function call per chunk for it.
"""

import traceback
from collections.abc import Callable

import orjson
import structlog
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.disconnect import ClientGone
from router.errors import InternalError, RouterError, ShuttingDown, answer, failure_headers, lorax_body, openai_body
from router.headers import request_id
from router.metrics import Metrics
from router.service import now

_OPEN_WHILE_DRAINING = frozenset(("/health", "/ping", "/ready", "/startup", "/metrics", "/info"))

GONE = 499
"""The status in logs of a request whose client did not wait for it."""

GENERATING = frozenset(
    ("/", "/invocations", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions")
)
"""Routes whose requests are counted as requests to the model."""

_log = structlog.get_logger(__name__)


class Entrance:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool], metrics: Metrics) -> None:
        self._app = app
        self._is_draining = is_draining
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = identity
        visit = _Visit(scope, send, identity)
        counted = scope["method"] == "POST" and scope["path"] in GENERATING
        if counted:
            self._metrics.request_arrived()
        with structlog.contextvars.bound_contextvars(request_id=identity):
            try:
                if self._is_draining() and not _stays_open(scope):
                    await visit.fail(ShuttingDown())
                else:
                    await self._app(scope, receive, visit.send)
            except (ClientGone, ClientDisconnect):
                visit.status = GONE
            except Exception as error:
                # Neither the exception's text nor its locals: both may hold a prompt.
                frames = traceback.extract_tb(error.__traceback__)
                where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
                _log.error("request broke", kind=type(error).__name__, where=where)
                await visit.fail(InternalError())
            finally:
                visit.log()
                if counted:
                    visit.count(self._metrics)


def _stays_open(scope: Scope) -> bool:
    return scope["path"] in _OPEN_WHILE_DRAINING or (scope["path"] == "/" and scope["method"] == "GET")


class _Visit:
    """One request on its way out: adds the id, remembers the status."""

    def __init__(self, scope: Scope, send: Send, identity: str) -> None:
        self._scope = scope
        self._send = send
        self._identity = identity.encode()
        self._began_at = now()
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self._identity)]
        await self._send(message)

    async def fail(self, error: RouterError) -> None:
        """Answer with `error`, unless an answer has begun."""
        self._scope["state"]["failure"] = error
        if self.status:
            return
        status, body = failure_answer(error, self._scope["path"])
        headers = {"content-type": "application/json", "content-length": str(len(body))} | failure_headers(error)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})

    def log(self) -> None:
        seconds = round(now() - self._began_at, 6)
        say = _log.debug if self._scope["method"] == "GET" else _log.info
        path = self._scope["path"][:128]
        told = self._scope["state"].get("told", {})
        say("request", method=self._scope["method"], path=path, status=self.status, seconds=seconds, **told)

    def count(self, metrics: Metrics) -> None:
        failure = self._scope["state"].get("failure")
        if self.status == GONE:
            metrics.request_failed("dropped")
        elif failure is not None:
            metrics.request_failed(answer(failure).counted_as)
        else:
            metrics.request_succeeded(now() - self._began_at)


def failure_answer(error: RouterError, path: str) -> tuple[int, bytes]:
    """Status and JSON body of `error` in the shape of the route's family."""
    row = answer(error)
    if path.startswith("/v1/"):
        return row.openai_status, orjson.dumps(openai_body(error))
    return row.status, orjson.dumps(lorax_body(error))

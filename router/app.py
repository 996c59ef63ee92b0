"""The application: one line per route, one place where failures become answers. Knows every route, no rule."""

import functools
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from router import openapi
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.entrance import Entrance, failure_answer
from router.errors import BodyRejected, RouterError, UnknownMethod, UnknownRoute, answer, failure_headers
from router.metrics import Metrics
from router.routes.chat import ChatRoute
from router.routes.completions import CompletionsRoute
from router.routes.information import InformationRoutes
from router.routes.native import NativeRoutes
from router.routes.probes import ProbeRoutes
from router.service import Service
from router.text.tokenizer import Tokenizer

_CORS_HEADERS = ("content-type", "authorization", "x-request-id")


def create_app(dispatcher: Dispatcher, tokenizer: Tokenizer, config: RouterConfig, metrics: Metrics) -> FastAPI:
    """All routes over one dispatcher. The dispatcher is started and stopped by the caller."""
    service = Service(dispatcher, tokenizer, config, metrics)
    app = FastAPI(title="Lorikeet", docs_url="/docs", redoc_url=None)
    app.openapi = functools.cache(openapi.document)  # type: ignore[method-assign]
    _add_routes(app, service)
    app.add_exception_handler(RouterError, _answer_failure)
    app.add_exception_handler(HTTPException, _answer_unknown)
    app.add_middleware(Entrance, is_draining=lambda: dispatcher.draining, metrics=metrics)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.cors_allow_origin or ("*",),
        allow_methods=config.cors_allow_method or ("GET", "POST"),
        allow_headers=config.cors_allow_header or _CORS_HEADERS,
        expose_headers=config.cors_expose_header,
        allow_credentials=bool(config.cors_allow_credentials),
    )
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    native, probes, information = NativeRoutes(service), ProbeRoutes(service), InformationRoutes(service)

    def get(path: str, handle: Callable[[Request], Any]) -> None:
        app.router.add_route(path, handle, methods=["GET"])

    def post(path: str, handle: Callable[[Request], Any]) -> None:
        app.router.add_route(path, handle, methods=["POST"])

    post("/", native.compat)
    post("/invocations", native.compat)
    post("/generate", native.generate)
    post("/generate_stream", native.generate_stream)
    get("/", probes.health)
    get("/health", probes.health)
    get("/ping", probes.health)
    get("/ready", probes.ready)
    get("/startup", probes.startup)
    get("/info", information.info)
    get("/metrics", information.metrics)
    post("/tokenize", information.tokenize)
    get("/api-doc/openapi.json", _show_document)
    get("/v1/models", information.models)
    get("/v1/models/{model_id:path}", information.model)
    post("/v1/completions", CompletionsRoute(service).completions)
    post("/v1/chat/completions", ChatRoute(service).chat)
    for later in ("/embed", "/classify", "/classify_batch", "/v1/embeddings"):
        post(later, information.not_served)


async def _show_document(request: Request) -> Response:
    """Where LoRAX has it; FastAPI's own place is `/openapi.json`."""
    return JSONResponse(request.app.openapi())


async def _answer_failure(request: Request, error: Exception) -> Response:
    """LoRAX's and OpenAI's shapes; a body that could not be read is plain text on LoRAX's routes, as in axum."""
    assert isinstance(error, RouterError)
    request.state.failure = error
    headers = failure_headers(error)
    path = request.url.path
    if isinstance(error, BodyRejected) and not path.startswith("/v1/"):
        return PlainTextResponse(str(error), answer(error).status, headers)
    status, body = failure_answer(error, path)
    return Response(body, status, headers, media_type="application/json")


async def _answer_unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = UnknownMethod() if error.status_code == 405 else UnknownRoute()
    response = await _answer_failure(request, failure)
    response.headers.update(error.headers or {})
    return response

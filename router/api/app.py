"""The HTTP application: the table of routes, and the handlers that turn failures into answers."""

import asyncio
import functools
import importlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from lorikeet.router.api import openapi
from lorikeet.router.api.middleware import Handle, RequestMiddleware, failure_response
from lorikeet.router.api.pages import documentation_routes, page, page_routes, wants_page
from lorikeet.router.api.routes.adapter_files import AdapterFileRoutes
from lorikeet.router.api.routes.admin import AdminRoutes
from lorikeet.router.api.routes.chat import ChatRoute
from lorikeet.router.api.routes.completions import CompletionsRoute
from lorikeet.router.api.routes.information import ALTERNATIVES, METHODS, InformationRoutes, ProbeRoutes, out_of_scope
from lorikeet.router.api.routes.messages import MessagesRoute
from lorikeet.router.api.routes.native import NativeRoutes, PredictRoute
from lorikeet.router.api.routes.responses import ResponsesRoute
from lorikeet.router.api.routes.sagemaker import InvocationsRoute
from lorikeet.router.api.routes.tokens import TokenRoutes
from lorikeet.router.api.service import Service, make_service
from lorikeet.router.api.streaming import ClientGone
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import InternalError, RouterError, UnknownMethod, UnknownRoute
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lorikeet.router.api.routes.pooled import PooledRoutes

_Route = Callable[[Request], Coroutine[Any, Any, Response]]
_RESPONSE = "/v1/responses/{response_id}"
_STREAM = "/v1/streams/{stream_id}"


class Application(FastAPI):
    """Calls the middleware directly: the router has traces of its own, and needs none of FastAPI's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        assert self.middleware_stack is not None
        await self.middleware_stack(scope, receive, send)


def create_app(dispatcher: Dispatcher, tokenizer: Tokenizer, config: RouterConfig, metrics: Metrics) -> FastAPI:
    """All routes for one dispatcher, which the caller starts and stops."""
    service = make_service(dispatcher, tokenizer, config, metrics)
    app = Application(title="Lorikeet", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.routes += [*documentation_routes(), *page_routes()]
    app.state.service = service
    app.openapi = functools.cache(functools.partial(openapi.document, config.root_path))  # type: ignore[method-assign]
    generating = _generating(service)
    for path, handle in generating.items():
        app.router.add_route(path, handle, methods=["POST"])
    _add_routes(app, service)
    app.add_exception_handler(RouterError, _answer_failure)
    app.add_exception_handler(HTTPException, _answer_unknown)
    app.add_exception_handler(Exception, _answer_bug)
    app.middleware_stack = RequestMiddleware(app.build_middleware_stack(), generating, service, metrics)
    return app


def _generating(service: Service) -> dict[str, Handle]:
    """The POST routes to the model."""
    native, chat, completions = NativeRoutes(service), ChatRoute(service), CompletionsRoute(service)
    generating: dict[str, Handle] = {
        "/": native.compat,
        "/generate": native.generate,
        "/generate_stream": native.generate_stream,
        "/predict": PredictRoute(service, native).predict,
        "/v1/completions": completions.handle,
        "/v1/chat/completions": chat.handle,
        "/v1/responses": ResponsesRoute(service).handle,
        "/v1/messages": MessagesRoute(service).handle,
    }
    routes = generating | _pooled(service)
    return {**routes, "/invocations": InvocationsRoute(service, routes).handle}


def _pooled(service: Service) -> dict[str, Handle]:
    """The POST routes to embedding and classification models. Their module is imported with the first request to one:
    it imports numpy, which other routes do without.
    """
    imported: list[PooledRoutes] = []

    def handle(method: "Callable[[PooledRoutes], Handle]") -> Handle:
        async def answer(request: Request) -> Response:
            if not imported:
                module = await asyncio.to_thread(importlib.import_module, "lorikeet.router.api.routes.pooled")
                imported.append(module.PooledRoutes(service))
            return await method(imported[0])(request)

        return answer

    return {
        "/v1/embeddings": handle(lambda routes: routes.embeddings),
        "/v2/embed": handle(lambda routes: routes.cohere_embed),
        "/embed": handle(lambda routes: routes.embed),
        "/pooling": handle(lambda routes: routes.pooling),
        "/classify": handle(lambda routes: routes.classify),
        "/classify_batch": handle(lambda routes: routes.classify_batch),
        **dict.fromkeys(("/score", "/v1/score"), handle(lambda routes: routes.score)),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), handle(lambda routes: routes.rerank)),
    }


class AnyConvertor(PathConvertor):
    """The rest of a path. Starlette's `path` matches no line feed."""

    regex = "(?s:.*)"


register_url_convertor("any", AnyConvertor())


def _add_routes(app: FastAPI, service: Service) -> None:
    """All other routes."""
    probes, information, tokens = ProbeRoutes(service), InformationRoutes(service), TokenRoutes(service)
    admin, responses, messages = AdminRoutes(service), ResponsesRoute(service), MessagesRoute(service)
    read: dict[str, _Route] = {
        **dict.fromkeys(("/", "/health", "/healthz", "/livez", "/ping"), probes.health),
        **dict.fromkeys(("/ready", "/readyz"), probes.ready),
        **dict.fromkeys(("/startup", "/health_generate"), probes.startup),
        "/info": information.info,
        "/version": information.version,
        "/load": information.load,
        **dict.fromkeys(("/server_info", "/get_server_info"), information.server_info),
        **dict.fromkeys(("/model_info", "/get_model_info"), information.model_info),
        "/metrics": information.metrics,
        "/tokenizer_info": tokens.tokenizer_info,
        "/api-doc/openapi.json": _show_document,
        "/v1/models": information.models,
        "/v1/models/{model_id:any}": information.model,
        **dict.fromkeys((_RESPONSE, f"{_RESPONSE}/input_items"), responses.missing),
        "/admin/adapters": admin.listing,
        "/admin/learning": admin.learning,
    }
    write = {
        "/admin/adapters/load": admin.load,
        "/admin/adapters/pin": admin.pin,
        "/admin/adapters/unpin": admin.unpin,
        "/admin/adapters/unload": admin.unload,
        "/admin/adapters/refresh": admin.refresh,
        **AdapterFileRoutes(service, admin).routes(),
        "/admin/catalogue/reload": admin.reload,
        "/v1/load_lora_adapter": admin.load_lora_adapter,
        "/v1/unload_lora_adapter": admin.unload_lora_adapter,
        "/adapters": admin.load_sagemaker_adapter,
        "/ping": probes.health,
        "/tokenize": tokens.tokenize,
        "/chat_tokenize": tokens.chat_tokenize,
        "/detokenize": tokens.detokenize,
        "/v1/responses/input_tokens": responses.count,
        f"{_RESPONSE}/cancel": responses.missing,
        "/v1/messages/count_tokens": messages.count,
    }
    read |= {
        "/": _page_or(probes.health),
        "/v1/capabilities": information.capabilities,
        "/v1/live": information.watch,
        _STREAM: information.read_stream,
    }
    delete = {
        "/admin/learning": admin.purge_learning,
        "/v1/models/{model_id:any}": admin.delete_model,
        _RESPONSE: responses.missing,
        "/adapters/{adapter_name:any}": admin.unload_sagemaker_adapter,
        _STREAM: information.cancel_stream,
    }
    for path in ALTERNATIVES:
        for prefix in (path, f"{path}/{{rest:any}}"):
            app.router.add_route(prefix, out_of_scope, methods=METHODS)
    for method, routes in (("GET", read), ("POST", write), ("DELETE", delete)):
        for path, handle in routes.items():
            app.router.add_route(path, handle, methods=[method])


def _page_or(health: _Route) -> _Route:
    """Route of `GET /`: the page for browsers, LoRAX's health for all other clients."""

    async def answer(request: Request) -> Response:
        return await (page if wants_page(request) else health)(request)

    return answer


async def _show_document(request: Request) -> Response:
    """The document at LoRAX's path; FastAPI serves it at `/openapi.json`."""
    return JSONResponse(request.app.openapi())


async def _answer_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)
    request.state.failure = error
    return failure_response(error, request.scope)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return await _answer_failure(request, UnknownRoute())
    allowed = {"allow": ", ".join(_methods(request))}
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=allowed)
    response = await _answer_failure(request, UnknownMethod())
    response.headers.update(allowed)
    return response


def _methods(request: Request) -> list[str]:
    """All methods of the path: several routes may have it."""
    methods = {"OPTIONS"}
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The exception itself reaches the middleware, which logs where it was raised."""
    if isinstance(error, ClientGone):
        return Response()
    return await _answer_failure(request, InternalError())

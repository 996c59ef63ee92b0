"""SageMaker's container contract: `/invocations` with the bodies of other routes, and its routes for adapters."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto.pooling import CLASSIFY, EMBED
from lorikeet.router.api.middleware import ErrorStyle, Handle
from lorikeet.router.api.service import Service
from lorikeet.router.errors import ValidationError

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"


class InvocationsRoute:
    """Passes requests on to the routes of other APIs."""

    def __init__(self, service: Service, routes: Mapping[str, Handle]) -> None:
        """`routes`: those to the model, by path."""
        self._service = service
        self._routes = routes

    async def handle(self, request: Request) -> Response:
        """Chats have `messages`, completions `prompt`, LoRAX's bodies `inputs`. A header may name the adapter. A model
        without text takes the bodies of its own routes.
        """
        body = await self._service.body(request)
        adapter = request.headers.get(ADAPTER_HEADER)
        model = self._service.pooled_model
        if "inputs" not in body and (model is not None or "messages" in body or "prompt" in body):
            request.state.error_style = ErrorStyle.OPENAI
            name = body.get("model") if adapter is None else adapter
            request.state.given_body = {**body, "model": "" if name is None else name}
            if model is not None:
                return await self._answered(request, _path(model.task, body))
            return await self._answered(request, "/v1/chat/completions" if "messages" in body else "/v1/completions")
        if adapter is not None:
            parameters = body.get("parameters") or {}
            named = parameters.get("adapter_id") if isinstance(parameters, dict) else None
            if named not in (None, adapter):
                raise ValidationError(f"`adapter_id` and the header {ADAPTER_HEADER} name two adapters", "adapter_id")
            if isinstance(parameters, dict):
                body = {**body, "parameters": {**parameters, "adapter_id": adapter}}
        request.state.given_body = body
        return await self._answered(request, "/" if model is None else "/embed" if model.task == EMBED else "/classify")

    async def _answered(self, request: Request, path: str) -> Response:
        """By the route of `path`, which traces name the operation by."""
        request.state.served_as = path
        return await self._routes[path](request)


def _path(task: str, body: Mapping[str, Any]) -> str:
    """Path of the route that a body without `inputs` is for, where the model is of this task."""
    if "query" in body:
        return "/rerank"
    if not body.keys().isdisjoint(("text_1", "text_2", "queries", "data_1", "data_2")):
        return "/score"
    return {EMBED: "/v1/embeddings", CLASSIFY: "/classify"}.get(task, "/pooling")

"""The OpenAPI document, from one table of routes and the models in `router/schemas/openapi_models.py`."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lorikeet.router.schemas import openapi_models as published


@dataclass(frozen=True)
class Operation:
    """One route as the document shows it."""

    method: str
    path: str
    summary: str
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    is_list: bool = False
    streams: type[BaseModel] | None = None
    """Data of each server-sent event, where the route can stream."""


OPERATIONS = (
    Operation(
        "post",
        "/",
        "Generate, streaming when `stream` is true",
        published.CompatGenerateRequest,
        published.GenerateResponse,
        is_list=True,
        streams=published.StreamResponse,
    ),
    Operation(
        "post",
        "/invocations",
        "The same, for SageMaker",
        published.CompatGenerateRequest,
        published.GenerateResponse,
        is_list=True,
        streams=published.StreamResponse,
    ),
    Operation("post", "/generate", "Generate", published.GenerateRequest, published.GenerateResponse),
    Operation(
        "post",
        "/generate_stream",
        "Generate, one event per token",
        published.GenerateRequest,
        streams=published.StreamResponse,
    ),
    Operation(
        "post",
        "/predict",
        "Generate, in the shape of LLMSpeculativeSampling's server",
        published.PredictRequest,
        published.PredictResponse,
    ),
    Operation("post", "/tokenize", "Tokenize", published.TokenizeRequest, published.TokenizeToken, is_list=True),
    Operation(
        "post", "/v1/completions", "OpenAI's completions", published.CompletionRequest, published.CompletionResponse
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "OpenAI's chat completions",
        published.ChatCompletionRequest,
        published.ChatCompletionResponse,
    ),
    Operation("get", "/v1/models", "Served models", response=published.ModelList),
    Operation("get", "/v1/models/{model_id}", "One served model", response=published.Model),
    Operation("get", "/admin/adapters", "Named and loaded adapters", response=published.AdapterList),
    Operation("post", "/admin/adapters/load", "Bring an adapter near", published.AdapterName),
    Operation("post", "/admin/adapters/pin", "Load an adapter and have it stay", published.AdapterName),
    Operation("post", "/admin/adapters/unpin", "Let an adapter go when room is needed", published.AdapterName),
    Operation("post", "/admin/adapters/unload", "Free an adapter's memory", published.AdapterUnload),
    Operation("post", "/admin/adapters/refresh", "Ask sources again", published.AdapterRefresh),
    Operation("post", "/admin/catalogue/reload", "Read the operator's files again", response=published.Reloaded),
    Operation("post", "/v1/load_lora_adapter", "vLLM's: name an adapter", published.LoadLora),
    Operation("post", "/v1/unload_lora_adapter", "vLLM's: forget a name", published.UnloadLora),
    Operation("get", "/", "Whether shards answer"),
    Operation("get", "/health", "Whether shards answer"),
    Operation("get", "/ping", "Whether shards answer, for SageMaker"),
    Operation("get", "/ready", "Whether new requests are welcome"),
    Operation("get", "/startup", "Generates one token, all the way through"),
    Operation("get", "/info", "Limits and effective configuration"),
    Operation("get", "/metrics", "Prometheus text, or JSON by the Accept header"),
)
_REF = "#/components/schemas/{model}"


def document() -> dict[str, Any]:
    """The whole document."""
    used: set[type[BaseModel]] = {published.ErrorResponse, published.OpenAIErrorResponse}
    for operation in OPERATIONS:
        used |= {model for model in (operation.request, operation.response, operation.streams) if model is not None}
    inputs: list[tuple[type[BaseModel], Any]] = [
        (model, "validation") for model in sorted(used, key=lambda model: model.__name__)
    ]
    _, schemas = models_json_schema(inputs, ref_template=_REF)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lorikeet", "version": "1", "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.response is not None:
        schema = _ref(operation.response)
        content["application/json"] = {"schema": {"type": "array", "items": schema} if operation.is_list else schema}
    if operation.streams is not None:
        content["text/event-stream"] = {"schema": _ref(operation.streams)}
    answer: dict[str, Any] = {"description": "Success"}
    if content:
        answer["content"] = content
    failure = published.OpenAIErrorResponse if operation.path.startswith("/v1/") else published.ErrorResponse
    shown: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.translate(_ID)}",
        "responses": {
            "200": answer,
            "default": {"description": "Failure", "content": {"application/json": {"schema": _ref(failure)}}},
        },
    }
    if operation.request is not None:
        shown["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(operation.request)}}}
    if "{model_id}" in operation.path:
        shown["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return shown


_ID = str.maketrans({"/": "_", "{": None, "}": None})


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}

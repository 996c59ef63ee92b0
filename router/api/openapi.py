"""The OpenAPI document, from one table of routes and the models in `router/schemas/openapi_*.py`."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lorikeet.router.schemas import openapi_adapters as adapter_models
from lorikeet.router.schemas import openapi_models as models


@dataclass(frozen=True)
class Operation:
    """One route of the document."""

    method: str
    path: str
    summary: str
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    is_list: bool = False
    streams: type[BaseModel] | None = None
    """Data of each server-sent event, where the route can stream."""


_COMPAT = (models.CompatGenerateRequest, models.GenerateResponse, True, models.StreamResponse)
OPERATIONS = (
    Operation("post", "/", "Generate, streaming when `stream` is true", *_COMPAT),
    Operation("post", "/invocations", "The same, for SageMaker", *_COMPAT),
    Operation("post", "/generate", "Generate", models.GenerateRequest, models.GenerateResponse),
    Operation("post", "/generate_stream", "Generate, one event per token", models.GenerateRequest,
              streams=models.StreamResponse),
    Operation("post", "/predict", "Generate, in the format of LLMSpeculativeSampling's server",
              models.PredictRequest, models.PredictResponse),
    Operation("post", "/tokenize", "Tokenize", models.TokenizeRequest, models.TokenizeToken, is_list=True),
    Operation("post", "/v1/completions", "OpenAI's completions", models.CompletionRequest, models.CompletionResponse),
    Operation("post", "/v1/chat/completions", "OpenAI's chat completions",
              models.ChatCompletionRequest, models.ChatCompletionResponse),
    Operation("get", "/v1/models", "The base model and the operator's adapters", response=adapter_models.ModelList),
    Operation("get", "/v1/models/{model_id}", "One of them", response=adapter_models.Model),
    Operation("get", "/admin/adapters", "Named adapters and loaded contents", response=adapter_models.AdapterList),
    Operation("post", "/admin/adapters/load", "Load an adapter before it is requested", adapter_models.AdapterName),
    Operation("post", "/admin/adapters/pin", "Load an adapter and keep it loaded", adapter_models.AdapterName),
    Operation("post", "/admin/adapters/unpin", "Allow the eviction of an adapter", adapter_models.AdapterName),
    Operation("post", "/admin/adapters/unload", "Free an adapter's memory", adapter_models.AdapterUnload),
    Operation("post", "/admin/adapters/refresh", "Query the sources again", adapter_models.AdapterRefresh),
    Operation("post", "/admin/catalogue/reload", "Reload the operator's files", response=adapter_models.Reloaded),
    Operation("post", "/v1/load_lora_adapter", "Name an adapter, as in vLLM", adapter_models.LoadLora),
    Operation("post", "/v1/unload_lora_adapter", "Remove a name, as in vLLM", adapter_models.UnloadLora),
    Operation("get", "/", "Liveness: whether shards answer"),
    Operation("get", "/health", "Liveness: whether shards answer"),
    Operation("get", "/ping", "Liveness, for SageMaker"),
    Operation("get", "/ready", "Readiness: whether new requests are accepted"),
    Operation("get", "/startup", "Startup: generates one token end to end"),
    Operation("get", "/info", "Limits and effective configuration"),
    Operation("get", "/metrics", "Metrics: Prometheus text, or JSON by the Accept header"),
)  # fmt: skip
_REF = "#/components/schemas/{model}"


def document() -> dict[str, Any]:
    """The whole document."""
    used: set[type[BaseModel]] = {models.ErrorResponse, models.OpenAIErrorResponse}
    for operation in OPERATIONS:
        used |= {model for model in (operation.request, operation.response, operation.streams) if model is not None}
    ordered = sorted(used, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REF)
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
        content |= _json({"type": "array", "items": schema} if operation.is_list else schema)
    if operation.streams is not None:
        content["text/event-stream"] = {"schema": _ref(operation.streams)}
    failure = models.OpenAIErrorResponse if operation.path.startswith("/v1/") else models.ErrorResponse
    shown: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.translate(_ID)}",
        "responses": {
            "200": {"description": "Success", **({"content": content} if content else {})},
            "default": {"description": "Failure", "content": _json(_ref(failure))},
        },
    }
    if operation.request is not None:
        shown["requestBody"] = {"required": True, "content": _json(_ref(operation.request))}
    if "{model_id}" in operation.path:
        shown["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return shown


_ID = str.maketrans({"/": "_", "{": None, "}": None})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}

"""The OpenAPI document, from a table of routes, the models in `router/schemas/` and the table
of errors.

An operation lists every status and media type of its answers.
"""

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic.json_schema import models_json_schema

from lorikeet.router import errors
from lorikeet.router.api.middleware import ErrorStyle, style_of_path
from lorikeet.router.api.routes.information import ALTERNATIVES, METHODS
from lorikeet.router.error_answers import ANSWERS
from lorikeet.router.schemas import adapters, answers, anthropic, native, openai, pooled, responses, tokens

JSON, TEXT, EVENTS, HTML = "application/json", "text/plain", "text/event-stream", "text/html"

Errors = frozenset[type[errors.RouterError]]


def _leaves(*classes: type[errors.RouterError]) -> Errors:
    """The rows of the table of errors of these classes."""
    return frozenset(leaf for leaf in ANSWERS if issubclass(leaf, classes))


_OF_KEYS = frozenset(
    leaf for leaf, row in ANSWERS.items() if row.status == 401 and not issubclass(leaf, errors.AdapterProblem)
)
_ANY = _leaves(errors.ShuttingDown, errors.InternalError) | _OF_KEYS
_BODY = _leaves(errors.BodyRejected, errors.BodyMemoryFull, errors.ValidationError)
_OTHER_ROUTES = _leaves(
    errors.ResponseNotFound, errors.UnknownRoute, errors.UnknownMethod,
    errors.AdminOnly, errors.AlreadyLoaded, errors.ReloadRefused,
    errors.RouteNotServed, errors.Unhealthy,
    errors.StreamNotFound, errors.StreamTrimmed,
)  # fmt: skip


class RouteKind(enum.Enum):
    """What an operation does, by which its errors are known."""

    GENERATE = frozenset(ANSWERS) - _OTHER_ROUTES
    TOKENIZE = _ANY | _BODY | (_leaves(errors.Refused) - _OTHER_ROUTES) | _leaves(
        errors.AdapterProblem, errors.ChatTemplateError, errors.ModelNotFound
    )  # fmt: skip
    PROBE = _leaves(errors.Unhealthy, errors.ShuttingDown, errors.InternalError)
    READ = _ANY | _leaves(errors.ModelNotFound)
    ADMIN = _ANY | _BODY | _leaves(
        errors.AdminOnly, errors.AdapterProblem, errors.AlreadyLoaded, errors.ModelNotFound,
        errors.RouteNotServed, errors.ReloadRefused, errors.Failed
    )  # fmt: skip
    WATCH = _ANY | _leaves(errors.AdminOnly)
    STREAM = _ANY | _leaves(errors.StreamNotFound, errors.StreamTrimmed, errors.ValidationError)
    MISSING = _ANY | _leaves(errors.ResponseNotFound)
    UNSUPPORTED = _ANY | _leaves(errors.RouteNotServed)


@dataclass(frozen=True)
class Operation:
    """One route of the document."""

    kind: RouteKind
    method: str
    path: str
    summary: str
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    is_list: bool = False
    streams: type[BaseModel] | None = None
    """Data of each server-sent event, where the route can stream."""
    media: tuple[str, ...] = ()
    """Media types of an answer without a model; none for an empty one."""
    styles: tuple[ErrorStyle, ...] = ()
    """Styles of the route's errors; none for the style of its path."""


class InvocationBody(
    RootModel[
        native.CompatGenerateRequest | openai.ChatCompletionRequest | openai.CompletionRequest
        | pooled.InputGroup | pooled.ScoreRequest | pooled.RerankRequest
    ]
):  # fmt: skip
    """LoRAX's body, a chat, or a completion; of a model without text a body of its routes."""


_COMPAT = (native.CompatGenerateRequest, answers.GenerateResponse, True, answers.StreamResponse)
_BOTH = (ErrorStyle.LORAX, ErrorStyle.OPENAI)
OPERATIONS = (
    Operation(RouteKind.GENERATE, "post", "/", "Generate, streaming when `stream` is true", *_COMPAT),
    Operation(RouteKind.GENERATE, "post", "/invocations", "For SageMaker: the body of another route",
              InvocationBody, answers.InvocationAnswer, streams=answers.InvocationEvent,
              styles=_BOTH),
    Operation(RouteKind.GENERATE, "post", "/generate", "Generate", native.GenerateRequest, answers.GenerateResponse),
    Operation(RouteKind.GENERATE, "post", "/generate_stream", "Generate, one event per token", native.GenerateRequest,
              streams=answers.StreamResponse),
    Operation(RouteKind.GENERATE, "post", "/predict", "Generate, in the format of LLMSpeculativeSampling's server",
              native.PredictRequest, answers.PredictResponse),
    Operation(RouteKind.TOKENIZE, "post", "/tokenize", "Tokenize, as in LoRAX or in vLLM",
              tokens.TokenizeBody, answers.TokenizeAnswer, styles=_BOTH),
    Operation(RouteKind.TOKENIZE, "post", "/chat_tokenize", "Tokenize a chat, as in TGI",
              tokens.TokenizeChat, answers.ChatTokenizeAnswer),
    Operation(RouteKind.TOKENIZE, "post", "/detokenize", "The text of token ids, as in vLLM",
              tokens.DetokenizeRequest, answers.DetokenizeAnswer),
    Operation(RouteKind.READ, "get", "/tokenizer_info", "The tokenizer's configuration, as in vLLM", media=(JSON,)),
    Operation(RouteKind.GENERATE, "post", "/v1/completions", "OpenAI's completions",
              openai.CompletionRequest, answers.CompletionResponse, streams=answers.CompletionChunk),
    Operation(RouteKind.GENERATE, "post", "/v1/chat/completions", "OpenAI's chat completions",
              openai.ChatCompletionRequest, answers.ChatCompletionResponse, streams=answers.ChatCompletionChunk),
    Operation(RouteKind.READ, "get", "/ui",
              "A page with a playground and a live view; at `/` for browsers", media=(HTML,)),
    Operation(RouteKind.READ, "get", "/v1/capabilities", "What the caller may ask for, and its limits", media=(JSON,)),
    Operation(RouteKind.WATCH, "get", "/v1/live", "What the server does now, as events without end", media=(EVENTS,)),
    Operation(RouteKind.STREAM, "get", "/v1/streams/{stream_id}", "The answer of a resumable request, from an event on",
              media=(EVENTS, JSON)),
    Operation(RouteKind.STREAM, "delete", "/v1/streams/{stream_id}",
              "Cancel a resumable request, and forget its answer"),
    Operation(RouteKind.GENERATE, "post", "/v1/responses", "OpenAI's responses; nothing is stored",
              responses.ResponsesRequest, answers.ResponsesAnswer, streams=answers.ResponsesEvent),
    Operation(RouteKind.TOKENIZE, "post", "/v1/responses/input_tokens", "Tokens of a response's input",
              responses.ResponsesRequest, answers.InputTokens),
    *(Operation(RouteKind.MISSING, method, f"/v1/responses/{{response_id}}{path}", "404: no response is stored")
      for method, path in (("get", ""), ("delete", ""), ("get", "/input_items"), ("post", "/cancel"))),
    Operation(RouteKind.GENERATE, "post", "/v1/messages", "Anthropic's messages",
              anthropic.MessagesRequest, answers.MessageAnswer, streams=answers.MessageEvent),
    Operation(RouteKind.TOKENIZE, "post", "/v1/messages/count_tokens", "Tokens of a message's prompt",
              anthropic.CountTokensRequest, answers.CountedTokens),
    Operation(RouteKind.GENERATE, "post", "/v1/embeddings", "OpenAI's embeddings",
              pooled.EmbeddingsRequest, answers.EmbeddingsResponse),
    Operation(RouteKind.GENERATE, "post", "/v2/embed", "Cohere's embeddings",
              pooled.CohereEmbedRequest, answers.CohereEmbedResponse),
    Operation(RouteKind.GENERATE, "post", "/embed", "LoRAX's embedding of one text",
              pooled.EmbedRequest, answers.EmbedResponse),
    Operation(RouteKind.GENERATE, "post", "/classify", "LoRAX's entities or labels of one text; vLLM's with `input`",
              pooled.ClassifyRequest, media=(JSON,), styles=_BOTH),
    Operation(RouteKind.GENERATE, "post", "/classify_batch", "LoRAX's entities or labels of several texts",
              pooled.ClassifyBatchRequest, media=(JSON,)),
    Operation(RouteKind.GENERATE, "post", "/pooling", "vLLM's: what the model computes",
              pooled.PoolingRequest, answers.PoolingResponse),
    *(Operation(RouteKind.GENERATE, "post", path, "Scores of pairs of texts",
                pooled.ScoreRequest, answers.ScoreResponse) for path in ("/score", "/v1/score")),
    *(Operation(RouteKind.GENERATE, "post", path, "Documents by relevance to a query",
                pooled.RerankRequest, answers.RerankResponse)
      for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Operation(RouteKind.READ, "get", "/v1/models", "The base model and the operator's adapters",
              response=answers.ModelList),
    Operation(RouteKind.READ, "get", "/v1/models/{model_id}", "One of them",
              response=answers.Model),
    Operation(RouteKind.ADMIN, "delete", "/v1/models/{model_id}", "Remove an adapter's name, and free its memory",
              response=answers.DeletedModel),
    Operation(RouteKind.ADMIN, "get", "/admin/adapters", "Named adapters and loaded contents",
              response=answers.AdapterList),
    Operation(RouteKind.ADMIN, "post", "/admin/adapters/load", "Load an adapter before it is requested",
              adapters.AdapterName, media=(JSON,)),
    Operation(RouteKind.ADMIN, "post", "/admin/adapters/pin", "Load an adapter and keep it loaded",
              adapters.AdapterName, media=(JSON,)),
    Operation(RouteKind.ADMIN, "post", "/admin/adapters/unpin", "Allow the eviction of an adapter",
              adapters.AdapterName, media=(JSON,)),
    Operation(RouteKind.ADMIN, "post", "/admin/adapters/unload", "Free an adapter's memory",
              adapters.AdapterUnload, media=(JSON,)),
    Operation(RouteKind.ADMIN, "post", "/admin/adapters/refresh", "Query the sources again",
              adapters.AdapterRefresh, media=(JSON,)),
    Operation(RouteKind.ADMIN, "post", "/admin/adapters/files/{name}/{file}",
              "Send one file of an adapter, as the body, to a local root"),
    Operation(RouteKind.ADMIN, "post", "/admin/adapters/files/{name}", "All files of an adapter were sent",
              media=(JSON,)),
    Operation(RouteKind.ADMIN, "post", "/admin/catalogue/reload", "Reload the operator's files",
              response=answers.Reloaded),
    Operation(RouteKind.ADMIN, "get", "/admin/learning", "Medusa heads learned from traffic, with decisions",
              media=(JSON,)),
    Operation(RouteKind.ADMIN, "delete", "/admin/learning", "Delete what was learned from traffic", media=(JSON,)),
    Operation(RouteKind.ADMIN, "post", "/v1/load_lora_adapter", "Name an adapter, as in vLLM",
              adapters.LoadLora, media=(TEXT,)),
    Operation(RouteKind.ADMIN, "post", "/v1/unload_lora_adapter", "Remove a name, as in vLLM",
              adapters.UnloadLora, media=(TEXT,)),
    Operation(RouteKind.ADMIN, "post", "/adapters", "Name an adapter, for SageMaker",
              adapters.SageMakerAdapter, media=(TEXT,)),
    Operation(RouteKind.ADMIN, "delete", "/adapters/{adapter_name}", "Remove a name, for SageMaker", media=(TEXT,)),
    *(Operation(RouteKind.PROBE, "get", path, "Liveness: whether shards answer")
      for path in ("/", "/health", "/healthz", "/livez", "/ping")),
    Operation(RouteKind.PROBE, "post", "/ping", "Liveness, for SageMaker"),
    *(Operation(RouteKind.PROBE, "get", path, "Readiness: whether new requests are accepted")
      for path in ("/ready", "/readyz")),
    *(Operation(RouteKind.PROBE, "get", path, "Startup: generates one token end to end")
      for path in ("/startup", "/health_generate")),
    Operation(RouteKind.READ, "get", "/info", "Limits and effective configuration", media=(JSON,)),
    Operation(RouteKind.READ, "get", "/version", "The version, as in vLLM", media=(JSON,)),
    Operation(RouteKind.READ, "get", "/load", "The number of queued and running requests, as in vLLM", media=(JSON,)),
    *(Operation(RouteKind.READ, "get", path, "Limits, as in SGLang", media=(JSON,))
      for path in ("/server_info", "/get_server_info")),
    *(Operation(RouteKind.READ, "get", path, "The model, as in SGLang", media=(JSON,))
      for path in ("/model_info", "/get_model_info")),
    Operation(RouteKind.READ, "get", "/metrics", "Metrics: Prometheus text, or JSON by the Accept header",
              media=(TEXT, JSON)),
    Operation(RouteKind.READ, "get", "/openapi.json", "This document", media=(JSON,)),
    Operation(RouteKind.READ, "get", "/api-doc/openapi.json", "This document, where LoRAX has it", media=(JSON,)),
    Operation(RouteKind.READ, "get", "/docs", "This document as a page", media=(HTML,)),
    *(Operation(RouteKind.UNSUPPORTED, method.lower(), path, f"Not supported (501): {alternative}")
      for prefix, alternative in ALTERNATIVES.items()
      for path in (prefix, f"{prefix}/{{rest}}")
      for method in METHODS),
)  # fmt: skip
_REF = "#/components/schemas/{model}"
_CONNECTION = {
    400: "The request is not valid HTTP",
    408: "The head of the request arrived too slowly",
    431: "The head of the request is too large",
}
"""Answers of the connection itself, before any route; plain text."""
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this server, or a token of a source"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "A key of this server"},
    "admin": {"type": "http", "scheme": "bearer", "description": "The admin key"},
}


def document(root_path: str = "") -> dict[str, Any]:
    """The whole document; `root_path` is the path of the server behind a reverse proxy."""
    used: set[type[BaseModel]] = {answers.ErrorResponse, answers.OpenAIErrorResponse, answers.AnthropicErrorResponse}
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
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": _SCHEMES},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.translate(_ID)}",
        "security": _security(operation.kind),
        "responses": _responses(operation),
    }
    if operation.request is not None:
        shown["requestBody"] = {"required": True, "content": _content(JSON, _ref(operation.request))}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]
    if operation.kind is RouteKind.STREAM and operation.method == "get":
        parameters.append({"name": "from", "in": "query", "schema": {"type": "integer", "minimum": 0}})
    if parameters:
        shown["parameters"] = parameters
    return shown


def _security(kind: RouteKind) -> list[dict[str, list[str]]]:
    """The keys that a request may have; `{}` is none, which the server may be configured to reject."""
    if kind is RouteKind.ADMIN:
        return [{"admin": []}, {"apiKey": []}]
    return [{}] if kind is RouteKind.PROBE else [{}, {"bearer": []}, {"apiKey": []}]


def _responses(operation: Operation) -> dict[str, Any]:
    """By status, the success first."""
    content: dict[str, Any] = {}
    for media in operation.media:
        content |= _content(media, {} if media == JSON else {"type": "string"})
    if operation.response is not None:
        schema = _ref(operation.response)
        content |= _content(JSON, {"type": "array", "items": schema} if operation.is_list else schema)
    if operation.streams is not None:
        content |= _content(EVENTS, _ref(operation.streams))
    responses: dict[str, Any] = {}
    if operation.kind not in (RouteKind.UNSUPPORTED, RouteKind.MISSING):
        success = "204" if operation.kind is RouteKind.STREAM and operation.method == "delete" else "200"
        responses[success] = {"description": "Success", **({"content": content} if content else {})}
    for status, media, schema in sorted(_failures(operation), key=lambda failure: failure[:2]):
        response = responses.setdefault(str(status), {"description": HTTPStatus(status).phrase, "content": {}})
        known = response["content"].get(media, {}).get("schema", schema)
        response["content"] |= _content(media, schema if known == schema else {"anyOf": [known, schema]})
    return responses


def _failures(operation: Operation) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(status, media type, schema) of every failure."""
    for status, text in _CONNECTION.items():
        yield status, TEXT, {"type": "string", "description": text}
    for style in operation.styles or (style_of_path(operation.path),):
        for leaf in operation.kind.value:
            row = ANSWERS[leaf]
            if style is ErrorStyle.OPENAI:
                yield row.openai_status, JSON, _ref(answers.OpenAIErrorResponse)
            elif style is ErrorStyle.ANTHROPIC:
                yield row.openai_status, JSON, _ref(answers.AnthropicErrorResponse)
            elif issubclass(leaf, errors.BodyRejected):
                yield row.status, TEXT, {"type": "string"}
            else:
                yield row.status, JSON, _ref(answers.ErrorResponse)


_ID = str.maketrans({"/": "_", "{": None, "}": None})


def _content(media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {media: {"schema": schema}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}

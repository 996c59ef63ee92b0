"""The routes to vectors: OpenAI's `/v1/embeddings` and LoRAX's `/embed`."""

import base64
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto.pooling import EMBED
from lorikeet.router.api.pooled import Values, check_task, compute, shortened
from lorikeet.router.api.service import Service, Timing, now
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.pooled import read_embeddings, read_lorax


class EmbeddingRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's `data`, and the same under LoRAX's name `embeddings`."""
        service, timing = self._service, Timing(now())
        body = await service.body(request)
        model = check_task(service, EMBED)
        wanted = read_embeddings(service.openai_defaults(service.caller(request), body), service.config)
        check_dimensions(wanted.dimensions, model.size)
        computed = await compute(service, request, wanted.texts, wanted.common, timing)
        vectors = shortened(np.concatenate(computed.values), wanted.dimensions)
        data = embedding_objects(vectors, wanted.encoding_format)
        answer = {
            "object": "list",
            "data": data,
            "model": wanted.common.adapter.name or service.config.model_id,
            "usage": computed.usage,
            "embeddings": data,
        }
        return Response(orjson.dumps(answer), headers=computed.headers, media_type="application/json")

    async def embed(self, request: Request) -> Response:
        """LoRAX's: one text."""
        service, timing = self._service, Timing(now())
        body = await service.body(request)
        check_task(service, EMBED)
        wanted = read_lorax(service.native_defaults(service.caller(request), body), service.config)
        computed = await compute(service, request, wanted.inputs, wanted.common, timing, "inputs")
        content = orjson.dumps({"embeddings": computed.values[0][0]}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(content, headers=computed.headers, media_type="application/json")


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raises ValidationError where the model's vectors have fewer."""
    if dimensions is not None and dimensions > size:
        raise ValidationError(f"`dimensions` must be <= {size}. Given: {dimensions}", "dimensions")


def embedding_objects(vectors: Values, encoding_format: str) -> orjson.Fragment:
    """OpenAI's list of embeddings. vectors: [n, size]."""
    objects: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": _shown(vector, encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return orjson.Fragment(orjson.dumps(objects, option=orjson.OPT_SERIALIZE_NUMPY))


def _shown(vector: Values, encoding_format: str) -> Any:
    """A list of numbers, or the base64 of float32 values, little-endian."""
    vector = np.ascontiguousarray(vector, "<f4")
    return base64.b64encode(vector.tobytes()).decode() if encoding_format == "base64" else vector

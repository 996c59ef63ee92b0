"""The routes to vectors: OpenAI's `/v1/embeddings` and LoRAX's `/embed`."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.pooling import EMBED
from lorikeet.router.api.pooled.compute import Values, check_task, compute, shortened
from lorikeet.router.api.pooled.files import PooledFiles
from lorikeet.router.api.prepare import Timing, now
from lorikeet.router.api.service import Service
from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.pooled import Embeddings, EmbeddingsRequest, EmbedRequest, Text


class EmbeddingRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._files = PooledFiles(service.config)

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's `data`, and the same under LoRAX's name `embeddings`."""
        service, timing = self._service, Timing(now())
        body = await service.body(request)
        model = check_task(service, EMBED)
        body = service.openai_defaults(service.caller(request), body)
        wanted = EmbeddingsRequest.read(body).to_request(service.config)
        check_fields(wanted, model)
        texts = prompted(self._files, wanted.texts, wanted.prompt_name)
        computed = await compute(service, request, texts, wanted.common, timing)
        vectors = shortened(np.concatenate(computed.values), wanted.dimensions)
        data = embedding_objects(vectors, wanted.encoding_format)
        answer = {
            "object": "list",
            "data": data,
            "model": wanted.common.adapter.name or service.config.model_name,
            "usage": computed.usage,
            "embeddings": data,
        }
        return Response(orjson.dumps(answer), headers=computed.headers, media_type="application/json")

    async def embed(self, request: Request) -> Response:
        """LoRAX's: one text."""
        service, timing = self._service, Timing(now())
        body = await service.body(request)
        check_task(service, EMBED)
        body = service.native_defaults(service.caller(request), body)
        wanted = EmbedRequest.read(body).to_request(service.config)
        texts = prompted(self._files, wanted.inputs)
        computed = await compute(service, request, texts, wanted.common, timing, "inputs")
        content = orjson.dumps({"embeddings": computed.values[0][0]}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(content, headers=computed.headers, media_type="application/json")


def prompted(files: PooledFiles, texts: Sequence[Text], prompt_name: str | None = None) -> list[Text]:
    """The texts after the model's prompt; token ids stay as they are."""
    return [files.prompted(text, prompt_name) if isinstance(text, str) else text for text in texts]


def check_fields(wanted: Embeddings, model: pb.PooledModel) -> None:
    """Raises ValidationError for fields that ask for what the model's task does not have."""
    if model.task == EMBED:
        if wanted.dimensions is not None and wanted.dimensions > model.size:
            raise ValidationError(f"`dimensions` must be <= {model.size}. Given: {wanted.dimensions}", "dimensions")
        check_activation(wanted.use_activation)
    elif wanted.dimensions is not None:
        raise UnsupportedField("dimensions", "is of embedding models, and this model classifies")


def check_activation(use_activation: bool) -> None:
    """Checks the activation that a request to an embedding model asks for. Raises UnsupportedField."""
    if not use_activation:
        raise UnsupportedField("use_activation", "is of models that classify: files say what follows pooling here")


def encoded(values: Values, encoding_format: str) -> Any:
    """Numbers, or the base64 of float32 values, little-endian."""
    values = np.ascontiguousarray(values, "<f4")
    return base64.b64encode(values.tobytes()).decode() if encoding_format == "base64" else values


def embedding_objects(vectors: Values, encoding_format: str) -> orjson.Fragment:
    """OpenAI's list of embeddings. vectors: [n, size]."""
    objects: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": encoded(vector, encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return orjson.Fragment(orjson.dumps(objects, option=orjson.OPT_SERIALIZE_NUMPY))

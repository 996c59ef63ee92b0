"""Cohere's `/v2/embed`, as vLLM has it too."""

import secrets
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto.pooling import EMBED
from lorikeet.router.api.pooled.compute import Values, check_task, compute, shortened
from lorikeet.router.api.pooled.embeddings import check_fields, encoded, prompted
from lorikeet.router.api.pooled.files import PooledFiles
from lorikeet.router.api.prepare import Timing, now
from lorikeet.router.api.service import Service
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.dialects import cohere
from lorikeet.router.schemas.dialects.translated import in_words_of
from lorikeet.router.schemas.pooled import EmbeddingsRequest


class CohereRoute:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._files = PooledFiles(service.config)

    async def embed(self, request: Request) -> Response:
        """The vectors of all texts, in each of the types that are asked for."""
        service, timing = self._service, Timing(now())
        body = await service.body(request)
        model = check_task(service, EMBED)
        translated = cohere.CohereEmbedRequest.read(body).translated(self._files.prompts)
        with in_words_of(cohere.NAMES):
            given = service.openai_defaults(service.caller(request), translated.body)
            wanted = EmbeddingsRequest.read(given).to_request(service.config)
            check_fields(wanted, model)
            texts = prompted(self._files, wanted.texts, wanted.prompt_name)
            computed = await compute(service, request, texts, wanted.common, timing)
        vectors = shortened(np.concatenate(computed.values), wanted.dimensions)
        answer = {
            "id": f"embd-{secrets.token_hex(16)}",
            "embeddings": {name: typed(vectors, name) for name in translated.types},
            "texts": translated.texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": computed.num_tokens},
                "tokens": {"input_tokens": computed.num_tokens},
            },
            "response_type": "embeddings_by_type",
        }
        content = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(content, headers=computed.headers, media_type="application/json")


def typed(vectors: Values, name: str) -> list[Any]:
    """vectors: [n, size]. Each as numbers, as base64 of float32, or as one bit per value, the first one highest: 1 for
    values from zero on. Bytes of `binary` are lower by 128. Raises ValidationError.
    """
    if name in ("float", "base64"):
        return [encoded(vector, name) for vector in vectors]
    if vectors.shape[1] % 8:
        rule = f"{name} needs a number of dimensions that is a multiple of 8. Given: {vectors.shape[1]}"
        raise ValidationError(f"`embedding_types` {rule}", "embedding_types")
    packed = np.packbits(vectors >= 0, axis=1)
    return list(packed if name == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8))

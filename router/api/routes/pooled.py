"""The routes to vectors (OpenAI's `/v1/embeddings`, LoRAX's `/embed`, Cohere's `/v2/embed`), to labels (LoRAX's
`/classify` and `/classify_batch`, vLLM's `/classify` and `/pooling`) and to scores of pairs (`/score`, `/rerank`).
"""

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY
from lorikeet.router.api.middleware import ErrorStyle
from lorikeet.router.api.pooled_models import Computed, PooledFiles, Values, activated, check_task, compute, shortened
from lorikeet.router.api.prepare import Timing, now
from lorikeet.router.api.service import Service
from lorikeet.router.errors import UnsupportedField, ValidationError, WrongTask
from lorikeet.router.schemas.model import in_words_of
from lorikeet.router.schemas.pooled import (
    COHERE_NAMES,
    ClassifyBatchRequest,
    CohereEmbedRequest,
    Embeddings,
    EmbeddingsRequest,
    EmbedRequest,
    InputGroup,
    LoraxTexts,
    Pairs,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    Text,
)


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


_NO_ENTITY = "O"
_TASKS = {
    EMBED: (EMBED, "token_embed"),
    CLASSIFY: (CLASSIFY, "token_classify"),
    TOKEN_CLASSIFY: (TOKEN_CLASSIFY, "token_classify"),
}
"""vLLM's tasks of a model, by its own: for a whole text and for every token."""


class ClassificationRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._files = PooledFiles(service.config)

    async def classify(self, request: Request) -> Response:
        """LoRAX's with `inputs`, vLLM's with `input`."""
        timing = Timing(now())
        body = await self._service.body(request)
        if "input" in body and "inputs" not in body:
            request.state.error_style = ErrorStyle.OPENAI
            return await self._classify_vllm(request, body, timing)
        [found], headers = await self._classify_lorax(request, body, timing, is_batch=False)
        return _json(found, headers)

    async def classify_batch(self, request: Request) -> Response:
        """LoRAX's: a list of texts."""
        timing = Timing(now())
        found, headers = await self._classify_lorax(request, await self._service.body(request), timing, is_batch=True)
        return _json(found, headers)

    async def pooling(self, request: Request) -> Response:
        """vLLM's: vectors, scores, or scores per token."""
        service, timing = self._service, Timing(now())
        body = await service.body(request)
        model = check_task(service, EMBED, CLASSIFY, TOKEN_CLASSIFY)
        pooling = PoolingRequest.read(service.openai_defaults(service.caller(request), body))
        per_token = is_per_token(model, pooling.task)
        wanted, computed = await self._computed(request, pooling, timing, model, per_token=per_token)
        if model.task == EMBED:
            values = [shortened(each, wanted.dimensions) for each in computed.values]
        else:
            values = [self._scores(each, wanted.use_activation) for each in computed.values]
        values = values if per_token else [each[0] for each in values]
        data = [
            {"index": index, "object": "pooling", "data": encoded(each, wanted.encoding_format)}
            for index, each in enumerate(values)
        ]
        return _json(self._listed("pool", wanted, computed, data), computed.headers)

    async def _classify_vllm(self, request: Request, body: dict[str, Any], timing: Timing) -> Response:
        model = check_task(self._service, CLASSIFY)
        given = InputGroup.read(self._service.openai_defaults(self._service.caller(request), body))
        if given.encoding_format == "base64":
            raise UnsupportedField("encoding_format", "must be float on this route")
        wanted, computed = await self._computed(request, given, timing, model)
        data = []
        for index, logits in enumerate(computed.values):
            [scores] = self._scores(logits, wanted.use_activation)
            label = self._files.labels(len(scores))[int(scores.argmax())]
            data.append({"index": index, "label": label, "probs": scores, "num_classes": len(scores)})
        return _json(self._listed("classify", wanted, computed, data), computed.headers)

    async def _classify_lorax(
        self, request: Request, body: dict[str, Any], timing: Timing, *, is_batch: bool
    ) -> tuple[list[Any], dict[str, str]]:
        service = self._service
        model = check_task(service, CLASSIFY, TOKEN_CLASSIFY)
        body = service.native_defaults(service.caller(request), body)
        wanted = (ClassifyBatchRequest if is_batch else EmbedRequest).read(body).to_request(service.config)
        computed = await compute(service, request, wanted.inputs, wanted.common, timing, "inputs")
        found = list(self._lorax_answers(wanted, computed, is_per_token=model.task == TOKEN_CLASSIFY))
        service.metrics.request_input_count.observe(len(found))
        service.metrics.request_classify_output_count.observe(sum(map(len, found)))
        return found, computed.headers

    def _lorax_answers(self, wanted: LoraxTexts, computed: Computed, *, is_per_token: bool) -> Iterator[list[Any]]:
        """Entities, or for a model that labels whole texts all labels, the likeliest first."""
        for text, each, logits in zip(wanted.inputs, computed.encoded, computed.values, strict=True):
            labels = self._files.labels(logits.shape[1])
            if is_per_token:
                spans = [None if special else span for span, special in zip(each.offsets, each.special, strict=True)]
                yield entities(text, spans, activated(logits, "softmax"), labels)
            else:
                [scores] = self._scores(logits, True)
                order = np.argsort(-scores, kind="stable")
                yield [{"label": labels[index], "score": float(scores[index])} for index in order]

    async def _computed(
        self,
        request: Request,
        body: InputGroup,
        timing: Timing,
        model: pb.PooledModel,
        *,
        per_token: bool = False,
    ) -> tuple[Embeddings, Computed]:
        """Computes a body with vLLM's fields."""
        service = self._service
        wanted = body.to_request(service.config)
        check_fields(wanted, model)
        texts = prompted(self._files, wanted.texts, wanted.prompt_name)
        return wanted, await compute(service, request, texts, wanted.common, timing, per_token=per_token)

    def _scores(self, logits: Values, use_activation: bool) -> Values:
        return activated(logits, self._files.activation) if use_activation else logits

    def _listed(
        self, prefix: str, wanted: Embeddings, computed: Computed, data: list[dict[str, Any]]
    ) -> dict[str, Any]:
        name = wanted.common.adapter.name or self._service.config.model_name
        return {**envelope(prefix, name), "object": "list", "data": data, "usage": computed.usage}


def is_per_token(model: pb.PooledModel, task: Any) -> bool:
    """Whether vLLM's `task` is a result for every token; without one it is the model's own. Raises UnsupportedField."""
    pooled, each = _TASKS[model.task]
    if task in (None, pooled):
        return model.task == TOKEN_CLASSIFY
    if task != each:
        raise UnsupportedField("task", f"must be {pooled} or {each}, which are those of the model")
    if not model.is_whole:
        raise UnsupportedField("task", f"{each} needs a model that computes a prompt in one step")
    return True


def envelope(prefix: str, model: str) -> dict[str, Any]:
    """What vLLM's answers begin with."""
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": model}


def entities(text: str, spans: list[tuple[int, int] | None], scores: Values, labels: list[str]) -> list[dict[str, Any]]:
    """Neighbouring tokens of one entity, as transformers' pipelines group them (`simple`); words in lower case, as in
    LoRAX. spans: characters of each token, None for special ones. scores: [tokens, labels].
    """
    groups: list[tuple[str, list[int]]] = []
    last = _NO_ENTITY
    for index, span in enumerate(spans):
        if span is None:
            continue
        begins, tag = _tag(labels[int(scores[index].argmax())])
        if groups and tag == last and not begins:
            groups[-1][1].append(index)
        else:
            groups.append((tag, [index]))
        last = tag
    found = []
    for tag, tokens in groups:
        if tag == _NO_ENTITY:
            continue
        kept = [span for token in tokens if (span := spans[token]) is not None]
        start, end = kept[0][0], kept[-1][1]
        score = float(np.mean(scores[tokens].max(1), dtype=np.float64))
        word = text[start:end].lower()
        found.append({"entity_group": tag, "score": score, "word": word, "start": start, "end": end})
    return found


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, and the entity's name."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _json(content: Any, headers: dict[str, str]) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, headers=headers, media_type="application/json")


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
        translated = CohereEmbedRequest.read(body).translated(self._files.prompts)
        with in_words_of(COHERE_NAMES):
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


class PairRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._files = PooledFiles(service.config)

    async def score(self, request: Request) -> Response:
        """vLLM's: one text with each of the others, or pair by pair."""
        service, timing = self._service, Timing(now())
        body = service.openai_defaults(service.caller(request), await service.body(request))
        wanted = ScoreRequest.read(body).to_request(service.config)
        scores, computed = await self._scores(request, wanted, timing, wanted_names=("text_1", "text_2"))
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())]
        name = wanted.common.adapter.name or service.config.model_name
        answer = {**envelope("score", name), "object": "list", "data": data, "usage": computed.usage}
        return Response(orjson.dumps(answer), headers=computed.headers, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        """Jina's and Cohere's: the documents, the most relevant first."""
        service, timing = self._service, Timing(now())
        body = service.openai_defaults(service.caller(request), await service.body(request))
        wanted = RerankRequest.read(body).to_request(service.config)
        scores, computed = await self._scores(request, wanted, timing, wanted_names=("query", "documents"))
        order = np.argsort(-scores, kind="stable")[: wanted.top_n]
        results = [
            {"index": int(index), "document": {"text": wanted.second[index]}, "relevance_score": float(scores[index])}
            for index in order
        ]
        name = wanted.common.adapter.name or service.config.model_name
        answer = {**envelope("rerank", name), "usage": computed.usage, "results": results}
        return Response(orjson.dumps(answer), headers=computed.headers, media_type="application/json")

    async def _scores(
        self, request: Request, wanted: Pairs, timing: Timing, wanted_names: tuple[str, str]
    ) -> tuple[Values, Computed]:
        """[pairs] float32."""
        model = check_task(self._service, CLASSIFY, EMBED)
        if model.task == EMBED:
            check_activation(wanted.use_activation)
            return await self._cosines(request, wanted, timing, wanted_names[1])
        cut = replace(wanted.common.cut, has_types=self._files.has_token_types)
        common = replace(wanted.common, cut=cut)
        computed = await compute(self._service, request, wanted.pairs, common, timing, wanted_names[1])
        logits = np.concatenate(computed.values)
        if logits.shape[1] != 1:
            raise WrongTask(f"scores of pairs need a model with one label, and this one has {logits.shape[1]}")
        scores = activated(logits, self._files.activation) if wanted.use_activation else logits
        return scores[:, 0], computed

    async def _cosines(self, request: Request, wanted: Pairs, timing: Timing, field: str) -> tuple[Values, Computed]:
        texts = prompted(self._files, [*wanted.first, *wanted.second])
        computed = await compute(self._service, request, texts, wanted.common, timing, field)
        vectors = np.concatenate(computed.values).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        first, second = vectors[: len(wanted.first)], vectors[len(wanted.first) :]
        return np.asarray((first * second).sum(1), np.float32), computed

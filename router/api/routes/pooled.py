"""The routes to embedding and classification models.

Vectors: OpenAI's `/v1/embeddings`, LoRAX's `/embed`, Cohere's `/v2/embed`. Labels: LoRAX's `/classify` and
`/classify_batch`, vLLM's `/classify`. vLLM's `/pooling` gives whatever the model computes. `/score` and `/rerank`
compare texts, by a cross-encoder or by the cosines of embeddings.
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
from lorikeet.router.api.answer_parts import json_response
from lorikeet.router.api.middleware import ErrorStyle
from lorikeet.router.api.pooled_models import Computed, PooledFiles, Values, activated, check_task, compute, shortened
from lorikeet.router.api.prepare import Timing, now
from lorikeet.router.api.service import Routes, Service
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
    PooledFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    Text,
)

_NO_ENTITY = "O"
_TASKS = {
    EMBED: (EMBED, "token_embed"),
    CLASSIFY: (CLASSIFY, "token_classify"),
    TOKEN_CLASSIFY: (TOKEN_CLASSIFY, "token_classify"),
}
"""vLLM's tasks of a model, by its own: for a whole text and for every token."""


class PooledRoutes(Routes):
    """The handlers."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._files = PooledFiles(service.config)

    # Vectors

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's `data`, and the same list under LoRAX's name `embeddings`."""
        timing, body = Timing(now()), await self._service.body(request)
        model = check_task(self._service, EMBED)
        fields, computed = await self._computed(
            request, EmbeddingsRequest.read(self._with_defaults(request, body)), timing, model
        )
        vectors = shortened(np.concatenate(computed.values), fields.dimensions)
        data = embedding_objects(vectors, fields.encoding_format)
        name = self._model_name(fields.common)
        answer = {"object": "list", "data": data, "model": name, "usage": computed.usage, "embeddings": data}
        return json_response(answer, computed.headers)

    async def embed(self, request: Request) -> Response:
        """LoRAX's: one text."""
        service, timing = self._service, Timing(now())
        body = await service.body(request)
        check_task(service, EMBED)
        fields = EmbedRequest.read(service.native_defaults(service.caller(request), body)).to_request(service.config)
        texts = self._prompted(fields.inputs)
        computed = await compute(service, request, texts, fields.common, timing, "inputs")
        return json_response({"embeddings": computed.values[0][0]}, computed.headers)

    async def cohere_embed(self, request: Request) -> Response:
        """Cohere's, as vLLM has it too: the vectors of all texts, in each of the types that are asked for."""
        timing, body = Timing(now()), await self._service.body(request)
        model = check_task(self._service, EMBED)
        translated = CohereEmbedRequest.read(body).translated(self._files.prompts)
        with in_words_of(COHERE_NAMES):
            embeddings = EmbeddingsRequest.read(self._with_defaults(request, translated.body))
            fields, computed = await self._computed(request, embeddings, timing, model)
        vectors = shortened(np.concatenate(computed.values), fields.dimensions)
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
        return json_response(answer, computed.headers)

    async def pooling(self, request: Request) -> Response:
        """vLLM's: vectors, scores, or scores per token."""
        timing, body = Timing(now()), await self._service.body(request)
        model = check_task(self._service, EMBED, CLASSIFY, TOKEN_CLASSIFY)
        pooling = PoolingRequest.read(self._with_defaults(request, body))
        per_token = is_per_token(model, pooling.task)
        fields, computed = await self._computed(request, pooling, timing, model, per_token=per_token)
        if model.task == EMBED:
            results = [shortened(vectors, fields.dimensions) for vectors in computed.values]
        else:
            results = [self._scores(logits, fields.use_activation) for logits in computed.values]
        data = [
            {
                "index": index,
                "object": "pooling",
                "data": encoded(result if per_token else result[0], fields.encoding_format),
            }
            for index, result in enumerate(results)
        ]
        return json_response(self._listed("pool", fields.common, computed, data), computed.headers)

    # Labels

    async def classify(self, request: Request) -> Response:
        """LoRAX's with `inputs`, vLLM's with `input`."""
        timing, body = Timing(now()), await self._service.body(request)
        if "input" in body and "inputs" not in body:
            request.state.error_style = ErrorStyle.OPENAI
            return await self._classify_vllm(request, body, timing)
        [labels], headers = await self._classify_lorax(request, body, timing, EmbedRequest)
        return json_response(labels, headers)

    async def classify_batch(self, request: Request) -> Response:
        """LoRAX's: a list of texts."""
        timing, body = Timing(now()), await self._service.body(request)
        return json_response(*await self._classify_lorax(request, body, timing, ClassifyBatchRequest))

    async def _classify_vllm(self, request: Request, body: dict[str, Any], timing: Timing) -> Response:
        model = check_task(self._service, CLASSIFY)
        inputs = InputGroup.read(self._with_defaults(request, body))
        if inputs.encoding_format == "base64":
            raise UnsupportedField("encoding_format", "must be float on this route")
        fields, computed = await self._computed(request, inputs, timing, model)
        data = []
        for index, logits in enumerate(computed.values):
            [scores] = self._scores(logits, fields.use_activation)
            label = self._files.labels(len(scores))[int(scores.argmax())]
            data.append({"index": index, "label": label, "probs": scores, "num_classes": len(scores)})
        return json_response(self._listed("classify", fields.common, computed, data), computed.headers)

    async def _classify_lorax(
        self, request: Request, body: dict[str, Any], timing: Timing, kind: type[EmbedRequest | ClassifyBatchRequest]
    ) -> tuple[list[Any], dict[str, str]]:
        service = self._service
        model = check_task(service, CLASSIFY, TOKEN_CLASSIFY)
        fields = kind.read(service.native_defaults(service.caller(request), body)).to_request(service.config)
        computed = await compute(service, request, fields.inputs, fields.common, timing, "inputs")
        answers = list(self._lorax_answers(fields, computed, is_per_token=model.task == TOKEN_CLASSIFY))
        service.metrics.request_input_count.observe(len(answers))
        service.metrics.request_classify_output_count.observe(sum(map(len, answers)))
        return answers, computed.headers

    def _lorax_answers(self, fields: LoraxTexts, computed: Computed, *, is_per_token: bool) -> Iterator[list[Any]]:
        """Entities, or for a model that labels whole texts all labels, the likeliest first."""
        for text, tokens, logits in zip(fields.inputs, computed.encoded, computed.values, strict=True):
            labels = self._files.labels(logits.shape[1])
            if is_per_token:
                spans = [
                    None if special else span for span, special in zip(tokens.offsets, tokens.special, strict=True)
                ]
                yield entities(text, spans, activated(logits, "softmax"), labels)
            else:
                [scores] = self._scores(logits, True)
                order = np.argsort(-scores, kind="stable")
                yield [{"label": labels[index], "score": float(scores[index])} for index in order]

    # Pairs

    async def score(self, request: Request) -> Response:
        """vLLM's: one text with each of the others, or pair by pair."""
        timing, body = Timing(now()), await self._service.body(request)
        pairs = ScoreRequest.read(self._with_defaults(request, body)).to_request(self._service.config)
        scores, computed = await self._pair_scores(request, pairs, timing, "text_2")
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())]
        return json_response(self._listed("score", pairs.common, computed, data), computed.headers)

    async def rerank(self, request: Request) -> Response:
        """Jina's and Cohere's: the documents, the most relevant first."""
        timing, body = Timing(now()), await self._service.body(request)
        pairs = RerankRequest.read(self._with_defaults(request, body)).to_request(self._service.config)
        scores, computed = await self._pair_scores(request, pairs, timing, "documents")
        order = np.argsort(-scores, kind="stable")[: pairs.top_n]
        results = [
            {"index": int(index), "document": {"text": pairs.second[index]}, "relevance_score": float(scores[index])}
            for index in order
        ]
        frame = self._frame("rerank", pairs.common)
        return json_response({**frame, "usage": computed.usage, "results": results}, computed.headers)

    async def _pair_scores(self, request: Request, pairs: Pairs, timing: Timing, field: str) -> tuple[Values, Computed]:
        """[pairs] float32. `field` has the second texts."""
        service = self._service
        model = check_task(service, CLASSIFY, EMBED)
        if model.task == EMBED:
            check_activation(pairs.use_activation)
            texts = self._prompted([*pairs.first, *pairs.second])
            computed = await compute(service, request, texts, pairs.common, timing, field)
            vectors = np.concatenate(computed.values).astype(np.float64)
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            first, second = vectors[: len(pairs.first)], vectors[len(pairs.first) :]
            return np.asarray((first * second).sum(1), np.float32), computed
        common = replace(pairs.common, cut=replace(pairs.common.cut, has_types=self._files.has_token_types))
        computed = await compute(service, request, pairs.pairs, common, timing, field)
        logits = np.concatenate(computed.values)
        if logits.shape[1] != 1:
            raise WrongTask(f"scores of pairs need a model with one label, and this one has {logits.shape[1]}")
        return self._scores(logits, pairs.use_activation)[:, 0], computed

    # Shared

    def _with_defaults(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        return self._service.openai_defaults(self._service.caller(request), body)

    async def _computed(
        self, request: Request, body: InputGroup, timing: Timing, model: pb.PooledModel, *, per_token: bool = False
    ) -> tuple[Embeddings, Computed]:
        """Computes a body with OpenAI's and vLLM's fields."""
        fields = body.to_request(self._service.config)
        check_fields(fields, model)
        texts = self._prompted(fields.texts, fields.prompt_name)
        return fields, await compute(self._service, request, texts, fields.common, timing, per_token=per_token)

    def _prompted(self, texts: Sequence[Text], prompt_name: str | None = None) -> list[Text]:
        """The texts after the model's prompt; token ids stay as they are."""
        return [self._files.prompted(text, prompt_name) if isinstance(text, str) else text for text in texts]

    def _scores(self, logits: Values, use_activation: bool) -> Values:
        return activated(logits, self._files.activation) if use_activation else logits

    def _model_name(self, common: PooledFields) -> str:
        return common.adapter.name or self._service.config.model_name

    def _frame(self, prefix: str, common: PooledFields) -> dict[str, Any]:
        """What vLLM's answers begin with."""
        name = self._model_name(common)
        return {"id": f"{prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": name}

    def _listed(
        self, prefix: str, common: PooledFields, computed: Computed, data: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {**self._frame(prefix, common), "object": "list", "data": data, "usage": computed.usage}


def is_per_token(model: pb.PooledModel, task: Any) -> bool:
    """Whether vLLM's `task` is a result for every token; without one it is the model's own. Raises UnsupportedField."""
    pooled, per_token = _TASKS[model.task]
    if task in (None, pooled):
        return model.task == TOKEN_CLASSIFY
    if task != per_token:
        raise UnsupportedField("task", f"must be {pooled} or {per_token}, which are those of the model")
    if not model.is_whole:
        raise UnsupportedField("task", f"{per_token} needs a model that computes a prompt in one step")
    return True


def check_fields(fields: Embeddings, model: pb.PooledModel) -> None:
    """Raises ValidationError for fields that ask for what the model's task does not have."""
    if model.task == EMBED:
        if fields.dimensions is not None and fields.dimensions > model.size:
            raise ValidationError(f"`dimensions` must be <= {model.size}. Given: {fields.dimensions}", "dimensions")
        check_activation(fields.use_activation)
    elif fields.dimensions is not None:
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
    labelled = []
    for tag, tokens in groups:
        if tag == _NO_ENTITY:
            continue
        kept = [span for token in tokens if (span := spans[token]) is not None]
        start, end = kept[0][0], kept[-1][1]
        score = float(np.mean(scores[tokens].max(1), dtype=np.float64))
        word = text[start:end].lower()
        labelled.append({"entity_group": tag, "score": score, "word": word, "start": start, "end": end})
    return labelled


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, and the entity's name."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label

"""The routes to labels: LoRAX's `/classify` and `/classify_batch`, vLLM's `/classify`, and vLLM's `/pooling`, which
gives whatever the model computes.
"""

import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY
from lorikeet.router.api.middleware import ErrorStyle
from lorikeet.router.api.pooled.compute import Computed, Values, activated, check_task, compute, shortened
from lorikeet.router.api.pooled.embeddings import check_fields, encoded, prompted
from lorikeet.router.api.pooled.files import PooledFiles
from lorikeet.router.api.prepare import Timing, now
from lorikeet.router.api.service import Service
from lorikeet.router.errors import UnsupportedField
from lorikeet.router.schemas.pooled import (
    ClassifyBatchRequest,
    Embeddings,
    EmbedRequest,
    InputGroup,
    LoraxTexts,
    PoolingRequest,
)

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

"""From texts to vectors or scores: what the routes to embedding and classification models share."""

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from lorikeet.proto import pooling
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import Pooling
from lorikeet.router.api.answer_parts import Counts, answer_headers, ignored_fields
from lorikeet.router.api.prepare import (
    ROUTES_OF,
    PreparedRequest,
    Prompt,
    Prompts,
    Timing,
    cancel_all,
    check_ids,
    log_fields,
    prepare,
    submit_more,
)
from lorikeet.router.api.service import Service
from lorikeet.router.api.streaming import ClientWatch
from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ValidationError, WrongTask
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, FinishReason
from lorikeet.router.schemas.generation import RequestFields
from lorikeet.router.schemas.pooled import PooledFields, Text, check_num_tokens, check_text_length
from lorikeet.router.text.tokenizer import Encoded, Input, Tokenizer

Values = npt.NDArray[np.float32]


def check_task(service: Service, *tasks: str) -> pb.PooledModel:
    """The model, which must be of one of the tasks. Raises WrongTask."""
    model = service.pooled_model
    if model is None:
        raise WrongTask("this server's model generates text: start the server with --pooling to get its embeddings")
    if model.task not in tasks:
        raise WrongTask(f"this server's model is of the task {model.task}: use {ROUTES_OF[model.task]}")
    return model


class PooledTexts(Prompts):
    """Texts, pairs of texts and token ids; token ids are taken as they are, apart from being cut."""

    def __init__(
        self, service: Service, texts: Sequence[Text | tuple[str, str]], common: PooledFields, caller: str, field: str
    ) -> None:
        self._service = service
        self._texts = texts
        self._cut = common.cut
        self._caller = caller
        self._field = field

    async def tokenize(self, adapter: Adapter | None, tokenizer: Tokenizer) -> list[Prompt]:
        service, cut, field = self._service, self._cut, self._field
        written: list[Input] = [text for text in self._texts if not isinstance(text, list)]
        if cut.most is None:
            for part in (part for text in written for part in ((text,) if isinstance(text, str) else text)):
                check_text_length(part, service.tokenizer.length, service.config, field)
        tokenized = iter(await service.tokenizer.encode_texts(written, cut, caller=self._caller))
        prompts = []
        for text in self._texts:
            if isinstance(text, list):
                check_ids(service, text, field, tokenizer)
                kept = text if cut.most is None else text[: cut.most] if cut.side == "right" else text[-cut.most :]
                encoded = Encoded(kept)
            else:
                encoded = next(tokenized)
            check_num_tokens(encoded.ids, service.config, field)
            prompts.append(Prompt(encoded.ids, text if isinstance(text, str) else "", encoded=encoded))
        return prompts

    def max_tokens(self, num_prompt: int) -> int:
        return 1  # to the scheduler the result is the only token


@dataclass(frozen=True)
class Computed:
    """The results of one request's texts, in their order."""

    # [rows, size] of each text: one row, or one per token
    values: list[Values]
    encoded: list[Encoded]
    generations: list[Generation]
    headers: dict[str, str]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text.ids) for text in self.encoded)

    @property
    def usage(self) -> dict[str, int]:
        """`usage` of OpenAI's answers."""
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


async def compute(
    service: Service,
    request: Request,
    texts: Sequence[Text | tuple[str, str]],
    common: PooledFields,
    timing: Timing,
    field: str = "input",
    *,
    per_token: bool = False,
) -> Computed:
    """Tokenize, check, and compute all texts. `field` is the request's field that has them. `per_token`: a row of
    values for every token, whatever the model's task. Raises RouterError.
    """
    model = service.pooled_model
    assert model is not None, "the route checks the model's task first"
    is_listed = model.task == pooling.TOKEN_CLASSIFY
    if is_listed:
        common = replace(common, cut=replace(common.cut, wants_offsets=True))
    fields = RequestFields(
        adapter=common.adapter,
        pooling=Pooling(model.task, per_token=per_token or is_listed),
        priority=common.priority,
        seed=0,
    )
    prompts = PooledTexts(service, texts, common, service.caller(request).identity, field)
    async with ClientWatch(request.receive):
        prepared = await prepare(service, request, fields, prompts, timing)
        generations = [generation async for generation in _completed(service, request, prepared)]
    encoded = [prompt.encoded for prompt in prepared.prompts if prompt.encoded is not None]
    num_chars = sum(len(part) for text in texts for part in (text if isinstance(text, tuple) else (text,)))
    counts = Counts(num_chars, sum(len(prompt.ids) for prompt in prepared.prompts), 0, 0)
    request.state.log_fields = log_fields(prepared.requests[0], 0, FinishReason.LENGTH)
    request.state.log_fields |= {"prompt_tokens": counts.prompt_tokens}
    headers = answer_headers(service, timing, generations[0], counts) | ignored_fields(common.ignored)
    values = [_values(generation) for generation in generations]
    return Computed(values, encoded, generations, headers)


async def _completed(service: Service, request: Request, prepared: PreparedRequest) -> AsyncGenerator[Generation, None]:
    """The generations in their order, each complete; the others are queued as these end. Raises RouterError."""
    requests, generations = prepared.requests, prepared.generations
    try:
        for index in range(len(requests)):
            submit_more(service, request, prepared, num_done=index)
            while (await generations[index].next()).finish_reason is None:
                pass
            yield generations[index]
    finally:
        cancel_all(generations)


def _values(generation: Generation) -> Values:
    """[rows, size]: a row per token, or one."""
    pooling_of = generation.request.pooling
    num_rows = len(generation.request.prompt_ids) if pooling_of is not None and pooling_of.per_token else 1
    return np.frombuffer(generation.pooled, "<f4").reshape(num_rows, -1)


def activated(logits: Values, activation: str) -> Values:
    """logits: [..., labels]. Scores in float32."""
    values = logits.astype(np.float64)
    if activation == "sigmoid":
        values = 1.0 / (1.0 + np.exp(-values))
    elif activation == "softmax":
        values = np.exp(values - values.max(-1, keepdims=True))
        values /= values.sum(-1, keepdims=True)
    return values.astype(np.float32)


def shortened(vectors: Values, dimensions: int | None) -> Values:
    """vectors: [n, size]. The first dimensions of each, of length one again (Kusupati et al. 2022)."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    cut = vectors[:, :dimensions]
    return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)


_TYPED = frozenset({"bert", "electra", "ernie"})
"""Tokenizers that give types by default."""


@dataclass(frozen=True)
class PooledFiles:
    """Read when they are first needed: most servers have a model that generates text."""

    config: RouterConfig

    @cached_property
    def _configuration(self) -> dict[str, Any]:
        configuration: dict[str, Any] = json.loads(Path(self.config.model_path, "config.json").read_bytes())
        return configuration

    @cached_property
    def _pooled(self) -> pooling.PooledModel | None:
        config = self.config
        return pooling.read(Path(config.model_path), self._configuration, config.pooling or "", config.embedding_dim)

    @cached_property
    def has_token_types(self) -> bool:
        """Whether transformers gives the model the types of tokens: as tokenizer_config.json says, or as BERT's."""
        path = Path(self.config.model_path, "tokenizer_config.json")
        settings: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        if (names := settings.get("model_input_names")) is not None:
            return "token_type_ids" in names
        name = settings.get("tokenizer_class") or self._configuration.get("model_type", "")
        return str(name).lower().removesuffix("fast").removesuffix("tokenizer") in _TYPED

    def labels(self, num_labels: int) -> list[str]:
        """Names of the labels of scores: the model's, or numbers where an adapter has another number of them."""
        names = pooling.labels_of(self._configuration)
        return names if len(names) == num_labels else [f"LABEL_{index}" for index in range(num_labels)]

    @cached_property
    def activation(self) -> str:
        """What turns logits into scores: `sigmoid`, `softmax` or `none`."""
        return pooling.activation(self._configuration)

    @cached_property
    def prompts(self) -> dict[str, str]:
        """The model's prompts by name."""
        return {} if self._pooled is None else dict(self._pooled.prompts)

    def prompted(self, text: str, prompt_name: str | None = None) -> str:
        """The text as sentence-transformers gives it to the model: after the prompt of that name, or the default one.
        Raises ValidationError for an unknown name.
        """
        pooled, prompts = self._pooled, self.prompts
        if pooled is None:
            return text
        if prompt_name is not None and prompt_name not in prompts:
            known = ", ".join(prompts) or "none"
            raise ValidationError(f"`prompt_name` must be one of the model's prompts: {known}", "prompt_name")
        text = (pooled.default_prompt if prompt_name is None else prompts[prompt_name]) + text
        return text.lower() if pooled.lowercase else text

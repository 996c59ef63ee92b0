"""From texts to vectors or scores: what the routes to embedding and classification models share."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from lorikeet.proto import pooling
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import LogprobParams, Pooling
from lorikeet.router.api.disconnect import ClientWatch
from lorikeet.router.api.headers import Counts, answer_headers, ignored_fields
from lorikeet.router.api.service import Service, Timing, cancel_all, log_fields
from lorikeet.router.errors import Overloaded, WrongTask
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import FinishReason, GenerationRequest
from lorikeet.router.schemas.pooled import PooledFields, Text, check_num_tokens, check_text_length
from lorikeet.router.text.encoding import Encoded, Input

ROUTES_OF = {
    pooling.EMBED: "/v1/embeddings, /embed, /score, /rerank or /pooling",
    pooling.CLASSIFY: "/classify, /score, /rerank or /pooling",
    pooling.TOKEN_CLASSIFY: "/classify, /classify_batch or /pooling",
}
"""By the model's task."""

Values = npt.NDArray[np.float32]


def pooled_model(service: Service) -> pb.PooledModel | None:
    """What the model computes in place of text; None for a model that generates."""
    info = service.dispatcher.info
    return info.pooled_model if info is not None and info.HasField("pooled_model") else None


def check_generates(service: Service) -> None:
    """Raises WrongTask where the model computes vectors or labels."""
    if (model := pooled_model(service)) is not None:
        raise WrongTask(
            f"this server's model is of the task {model.task}: it generates no text. Use {ROUTES_OF[model.task]}"
        )


def check_task(service: Service, *tasks: str) -> pb.PooledModel:
    """The model, which must be of one of the tasks. Raises WrongTask."""
    model = pooled_model(service)
    if model is None:
        raise WrongTask("this server's model generates text: start the server with --pooling to get its embeddings")
    if model.task not in tasks:
        raise WrongTask(f"this server's model is of the task {model.task}: use {ROUTES_OF[model.task]}")
    return model


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
        return sum(len(each.ids) for each in self.encoded)

    @property
    def usage(self) -> dict[str, int]:
        """As in OpenAI's answers."""
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
    model = pooled_model(service)
    assert model is not None, "the route checks the model's task first"
    caller = service.caller(request)
    service.check_room(caller)
    async with ClientWatch(request.receive):
        adapter = await service.adapter(caller, common.adapter)
        if model.task == pooling.TOKEN_CLASSIFY:
            common = replace(common, cut=replace(common.cut, wants_offsets=True))
        encoded = await _encode(service, texts, common, caller.identity, field)
        shared = GenerationRequest(
            prompt_ids=[],
            max_new_tokens=1,
            logprobs=LogprobParams(),
            adapter=adapter,
            caller=caller.identity,
            cache_salt=caller.cache_salt(None),
            priority=common.priority,
            request_id=caller.request_id,
        )
        wanted = [
            replace(
                shared,
                prompt_ids=each.ids,
                text=text if isinstance(text, str) else "",
                pooling=Pooling(model.task, each.second_text, per_token or model.task == pooling.TOKEN_CLASSIFY),
                request_id=f"{caller.request_id}/{index}" if len(texts) > 1 else caller.request_id,
            )
            for index, (text, each) in enumerate(zip(texts, encoded, strict=True))
        ]
        service.validated(timing)
        generations = [each async for each in _run(service, request, wanted, timing.arrived_at)]
    num_chars = sum(len(part) for text in texts for part in (text if isinstance(text, tuple) else (text,)))
    counts = Counts(num_chars, sum(len(each.ids) for each in encoded), 0, 0)
    request.state.log_fields = log_fields(shared, 0, FinishReason.LENGTH) | {"prompt_tokens": counts.prompt_tokens}
    headers = answer_headers(service, timing, generations[0], counts) | ignored_fields(common.ignored)
    values = [_values(each) for each in generations]
    return Computed(values, encoded, generations, headers)


async def _run(
    service: Service, request: Request, wanted: list[GenerationRequest], arrived_at: float
) -> AsyncGenerator[Generation, None]:
    """Queue requests, as many at a time as one request may have sequences. Yields them complete, in order. Raises
    RouterError.
    """
    deadline, generations = service.begin(request, wanted, arrived_at)
    try:
        for index in range(len(wanted)):
            while len(generations) < min(len(wanted), index + service.config.max_sequences):
                try:
                    generations.append(service.queue(request, wanted[len(generations)], deadline))
                except Overloaded:
                    if len(generations) <= index:  # nothing of this request runs that would make room
                        raise
                    break
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


async def _encode(
    service: Service, texts: Sequence[Text | tuple[str, str]], common: PooledFields, caller: str, field: str
) -> list[Encoded]:
    """The tokens of each text. Token ids are taken as they are, apart from being cut."""
    config, cut = service.config, common.cut
    written: list[Input] = [text for text in texts if not isinstance(text, list)]
    if cut.most is None:
        for part in (part for each in written for part in ((each,) if isinstance(each, str) else each)):
            check_text_length(part, service.tokenizer.length, config, field)
    tokenized = iter(await service.tokenizer.encode_texts(written, cut, caller=caller))
    encoded = []
    for text in texts:
        if isinstance(text, list):
            service.check_ids(text, field)
            kept = text if cut.most is None else text[: cut.most] if cut.side == "right" else text[-cut.most :]
            encoded.append(Encoded(kept))
        else:
            encoded.append(next(tokenized))
        check_num_tokens(encoded[-1].ids, config, field)
    return encoded


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

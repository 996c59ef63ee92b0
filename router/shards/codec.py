"""Writes a generation as the wire's Submit message."""

from collections.abc import Iterable
from typing import Any

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.errors import ValidationError
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import GenerationRequest, Speculation

MAX_SUBMIT_BYTES = 4 << 20
"""The limit of a shard on one message."""
_OTHER_BYTES = 64 << 10
"""Enough for all fields of a Submit but token ids, biases, the salt and a grammar."""
_MAX_SHOWN = 256
"""Characters of names that are for logs."""
_CONVERTED = ("bias_ids", "bias_values", "bad_words", "min_tokens", "min_tokens_stop_ids")
_SAMPLING = [name for name in pb.Sampling.DESCRIPTOR.fields_by_name if name not in _CONVERTED]
_SPECULATION = list(pb.Speculation.DESCRIPTOR.fields_by_name)


def adapter_pin(adapter: Adapter, digest: str) -> pb.AdapterPin:
    """The shard identifies the adapter by its digest; the other fields are for logs."""
    ids = ",".join(pin.id for pin in adapter.pins)[:_MAX_SHOWN]
    return pb.AdapterPin(source=adapter.source, id=ids, revision=adapter.revision[:_MAX_SHOWN], digest=digest)


def check_size(request: GenerationRequest, vocab_size: int) -> None:
    """Raises ValidationError where the Submit message of a request could become larger than a shard accepts.

    After the loss of a shard it contains the output so far.
    """
    bytes_per_id = -(-max(vocab_size - 1, 1).bit_length() // 7)
    num_ids = len(request.prompt_ids) + request.max_new_tokens + len(request.speculation.prediction_ids)
    texts = request.cache_salt + ("" if request.grammar is None else request.grammar.text)
    most = (MAX_SUBMIT_BYTES - _OTHER_BYTES - len(texts.encode())) // bytes_per_id
    most -= 10 * len(request.sampling.logit_bias) + len(request.sampling.allowed_ids) + 2 * len(request.stop_token_ids)
    most -= sum(len(word) + 4 for word in request.sampling.bad_words)
    if num_ids > most:
        raise ValidationError(
            f"prompt, output and `prediction` may have {most} tokens together, which is what fits a message to a "
            f"shard. Given: {num_ids}"
        )


def submit_message(generation: Generation, deadline_ms: int = 0) -> pb.Submit:
    """Message that submits an admitted request; `deadline_ms` from now, 0 for none."""
    request, adapters = generation.request, generation.adapters
    sampling, speculation = request.sampling, request.speculation
    adapter, heads = adapters.adapter_pin, adapters.heads_pin
    return pb.Submit(
        id=generation.routing.wire_id,
        prompt_ids=generation.known_ids,
        num_emitted=len(generation.emitted_ids),
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
        sampling=pb.Sampling(
            bias_ids=[token_id for token_id, _ in sampling.logit_bias],
            bias_values=[value for _, value in sampling.logit_bias],
            bad_words=[pb.TokenSequence(token_ids=word) for word in sampling.bad_words],
            min_tokens=request.min_tokens,
            min_tokens_stop_ids=sorted(generation.masked_end_ids),
            **_fields(sampling, _SAMPLING),
        ),
        stop_ids=generation.end_ids,
        deadline_ms=deadline_ms,
        logprobs=pb.Logprobs(
            wanted=request.logprobs,
            alternatives=request.num_alternatives,
            alternative_ids=request.alternative_ids,
            prefill=request.prefill_logprobs and not generation.emitted_ids,
            mode=pb.Logprobs.RAW if request.raw_logprobs else pb.Logprobs.PROCESSED,
            prefill_alternatives=request.num_prefill_alternatives,
            prefill_ranks=request.prefill_ranks,
        ),
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        learning_tenant=request.learning_tenant,
        adapter=None if adapter is None else adapter_pin(*adapter),
        adapter_start=0 if adapter is None else adapters.start,
        heads=None if heads is None else adapter_pin(*heads),
        speculation=_speculation(speculation) if adapters.can_speculate else None,
        prediction_ids=speculation.prediction_ids,
        isolation_steps=generation.routing.poison_tracker.isolation_steps,
        grammar=None if request.grammar is None else pb.Grammar(**_fields(request.grammar, ("text", "proposes"))),
        pooling=None
        if request.pooling is None
        else pb.Pooling(**_fields(request.pooling, ("task", "second_text", "per_token"))),
    )


def _speculation(speculation: Speculation) -> pb.Speculation:
    """The default rule is sent as "", because shards of version 0.1 know it by another name."""
    message = pb.Speculation(**_fields(speculation, _SPECULATION))
    if message.verify == "shared-noise":
        message.ClearField("verify")
    return message


def _fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}

"""Writes a generation as the wire's Submit message."""

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.errors import ValidationError
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import GenerationRequest

MAX_SUBMIT_BYTES = 4 << 20
"""The limit of a shard on one message."""
_OTHER_BYTES = 64 << 10
"""Enough for all fields of a Submit but token ids, biases, the salt and a grammar."""
_MAX_SHOWN = 256
"""Characters of names that are for logs."""


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
    adapter, heads = adapters.adapter_pin, adapters.heads_pin
    submit = pb.Submit(
        id=generation.routing.wire_id,
        prompt_ids=generation.known_ids,
        num_emitted=len(generation.emitted_ids),
        max_new_tokens=request.max_new_tokens,
        stop_ids=generation.end_ids,
        deadline_ms=deadline_ms,
        cache_salt=request.cache_salt,
        tenant=request.tenant,
        learning_tenant=request.learning_tenant,
        adapter=None if adapter is None else adapter_pin(*adapter),
        adapter_start=0 if adapter is None else adapters.start,
        heads=None if heads is None else adapter_pin(*heads),
        isolation_steps=generation.routing.poison_tracker.isolation_steps,
    )
    request.sampling.to_wire(submit)
    request.logprobs.to_wire(submit)
    if generation.emitted_ids:
        submit.logprobs.prefill = False  # they were sent before the first token
    if adapters.can_speculate:
        request.speculation.to_wire(submit)
    if request.grammar is not None:
        request.grammar.to_wire(submit)
    if request.pooling is not None:
        request.pooling.to_wire(submit)
    return submit

"""Writes a generation as the wire's Submit message."""

from collections.abc import Iterable
from typing import Any

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import Speculation

_SAMPLING = [name for name in pb.Sampling.DESCRIPTOR.fields_by_name if not name.startswith("bias_")]
_SPECULATION = list(pb.Speculation.DESCRIPTOR.fields_by_name)


def adapter_pin(adapter: Adapter, digest: str) -> pb.AdapterPin:
    """The shard identifies the adapter by its digest; the other fields are for logs."""
    ids = ",".join(pin.id for pin in adapter.pins)
    return pb.AdapterPin(source=adapter.source, id=ids, revision=adapter.revision, digest=digest)


def submit_message(generation: Generation, stop_ids: Iterable[int], deadline_ms: int = 0) -> pb.Submit:
    """Of an admitted request; `deadline_ms` from now, 0 for none."""
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
            **_fields(sampling, _SAMPLING),
        ),
        stop_ids=() if request.ignore_eos else stop_ids,
        deadline_ms=deadline_ms,
        logprobs=pb.Logprobs(
            wanted=request.logprobs,
            alternatives=request.num_alternatives,
            prefill=request.prefill_logprobs and not generation.emitted_ids,
            mode=pb.Logprobs.RAW if request.raw_logprobs else pb.Logprobs.PROCESSED,
            prefill_alternatives=request.num_prefill_alternatives,
        ),
        cache_salt=request.cache_salt,
        adapter=None if adapter is None else adapter_pin(*adapter),
        heads=None if heads is None else adapter_pin(*heads),
        speculation=_speculation(speculation) if adapters.can_speculate else None,
        prediction_ids=speculation.prediction_ids,
        isolation_steps=generation.routing.poison_tracker.isolation_steps,
    )


def _speculation(speculation: Speculation) -> pb.Speculation:
    """The default rule is sent as "", because shards of version 0.1 know it by another name."""
    message = pb.Speculation(**_fields(speculation, _SPECULATION))
    if message.verify == "shared-noise":
        message.ClearField("verify")
    return message


def _fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}

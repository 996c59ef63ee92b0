"""A generation request as the wire's Submit message. Knows both shapes and nothing else."""

from collections.abc import Iterable

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import Speculation


def adapter_pin(adapter: Adapter, digest: str) -> pb.AdapterPin:
    """Names are for logs; what the shard goes by is the digest."""
    return pb.AdapterPin(
        source=adapter.source,
        id=",".join(pin.id for pin in adapter.pins),
        revision=adapter.revision,
        digest=digest,
    )


def submit_message(generation: Generation, stop_ids: Iterable[int], deadline_ms: int = 0) -> pb.Submit:
    """Of a request that was admitted; `deadline_ms` from now, 0 never."""
    request, contents = generation.request, generation.contents
    sampling = request.sampling
    adapter, heads = contents.adapter_pin, contents.heads_pin
    return pb.Submit(
        id=generation.wire_id,
        prompt_ids=generation.known_ids,
        num_emitted=len(generation.emitted_ids),
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
        sampling=pb.Sampling(
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            bias_ids=[token_id for token_id, _ in sampling.logit_bias],
            bias_values=[value for _, value in sampling.logit_bias],
            watermark=sampling.watermark,
        ),
        stop_ids=() if request.ignore_eos else stop_ids,
        group_id=request.group_id,
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
        speculation=_speculation(request.speculation) if contents.can_speculate else None,
        prediction_ids=request.speculation.prediction_ids,
        isolation_steps=0 if generation.poison_tracker is None else generation.poison_tracker.isolation_steps,
    )


def _speculation(wanted: Speculation) -> pb.Speculation:
    return pb.Speculation(
        method=wanted.method,
        num_tokens=wanted.num_tokens,
        schedule=wanted.schedule,
        verify=wanted.verify,
        num_heads=wanted.num_heads,
    )

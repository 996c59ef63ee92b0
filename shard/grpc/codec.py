"""Between the wire's messages and the shard's own words, both ways, with everything checked on the way in.

Runs in the gRPC thread; knows no stream, no step and no state of the shard beyond the fixed bounds.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.grpc.inbox import Commands, Refusal
from lorikeet.shard.grpc.outbox import Details, Output, StreamUpdate
from lorikeet.shard.scheduler.request import (
    LogprobParams,
    Method,
    Request,
    Rule,
    SamplingParams,
    Schedule,
    Speculation,
)

MAX_MESSAGE_BYTES = 3 << 20
"""Estimated size at which a message is cut; the wire's limit is 4 MiB."""
BYTES_PER_ITEM = 10
"""No token id, log probability or flag takes more, two alternatives' parts counted one by one."""
MAX_ALTERNATIVES = 256
MAX_DRAFTS = 64
SCHEDULES = set(map(str, Schedule))
RULES = set(map(str, Rule))
HEX_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Bounds:
    """What a request must keep within."""

    vocab_size: int
    max_total_tokens: int
    num_kv_tokens: int
    has_adapters: bool = False
    has_draft_model: bool = False


def read_command(epoch: int, command: pb.Command, bounds: Bounds) -> Commands:
    """Check a router's message. What cannot run becomes a Refusal; nothing is raised for bad values."""
    return Commands(
        epoch=epoch,
        submits=[read_submit(epoch, submit, bounds) for submit in command.submits],
        abort_ids=list(command.abort_ids),
        prefetches=[adapter.digest for adapter in command.prefetches if is_digest(adapter.digest)],
        pins=[(pin.digest, pin.pinned) for pin in command.pins if is_digest(pin.digest)],
        unloads=[digest for digest in command.unload_digests if is_digest(digest)],
    )


def read_submit(epoch: int, submit: pb.Submit, bounds: Bounds) -> Request | Refusal:
    """One request, or why it cannot run."""
    key = (epoch, submit.id)
    prompt_ids = list(submit.prompt_ids)
    fault = find_fault(submit, prompt_ids, bounds)
    if fault:
        return Refusal(key, fault)
    sampling, logprobs = submit.sampling, submit.logprobs
    return Request(
        key=key,
        token_ids=prompt_ids,
        num_prompt=len(prompt_ids) - submit.num_emitted,
        max_new_tokens=submit.max_new_tokens,
        sampling=SamplingParams(
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            logit_bias=tuple(zip(sampling.bias_ids, sampling.bias_values, strict=True)),
            watermark=sampling.watermark,
            seed=submit.seed,
        ),
        logprobs=LogprobParams(
            wanted=logprobs.wanted,
            alternatives=logprobs.alternatives,
            raw=logprobs.mode == pb.Logprobs.RAW,
            prefill=logprobs.prefill,
            prefill_alternatives=logprobs.prefill_alternatives,
        ),
        stop_ids=frozenset(submit.stop_ids),
        adapter_digest=submit.adapter.digest,
        heads_digest=submit.heads.digest,
        cache_salt=submit.cache_salt,
        deadline=time.monotonic() + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        speculation=read_speculation(submit),
        isolation_steps=submit.isolation_steps,
    )


def read_speculation(submit: pb.Submit) -> Speculation:
    """How far ahead is guessed; its words are known to be among those of the enumerations."""
    wanted = submit.speculation
    return Speculation(
        Method(wanted.method or Method.OFF),
        wanted.num_tokens,
        wanted.num_heads,
        Schedule(wanted.schedule or Schedule.CONSTANT),
        Rule(wanted.verify or Rule.COUPLED),
        tuple(submit.prediction_ids),
    )


def find_fault(submit: pb.Submit, prompt_ids: list[int], bounds: Bounds) -> str:
    """Why a request cannot run, in a sentence; empty if it can."""
    if not prompt_ids:
        return "the prompt is empty"
    if max(prompt_ids) >= bounds.vocab_size:
        return f"token id {max(prompt_ids)} of the prompt is outside the vocabulary of {bounds.vocab_size}"
    if submit.num_emitted >= len(prompt_ids):
        return "no token of the prompt is left beside those already emitted"
    if submit.max_new_tokens <= submit.num_emitted:
        return "max_new_tokens leaves nothing to generate"
    total = len(prompt_ids) - submit.num_emitted + submit.max_new_tokens
    if total > bounds.max_total_tokens:
        return f"prompt and max_new_tokens make {total} tokens; this shard takes {bounds.max_total_tokens}"
    if total > bounds.num_kv_tokens:
        return f"prompt and max_new_tokens make {total} tokens; the KV memory holds {bounds.num_kv_tokens}"
    if submit.HasField("adapter") and not (bounds.has_adapters and is_digest(submit.adapter.digest)):
        return "this shard serves no adapters" if not bounds.has_adapters else "an adapter's digest is 64 hex digits"
    if fault := find_speculation_fault(submit, bounds):
        return fault
    logprobs = submit.logprobs
    if max(logprobs.alternatives, logprobs.prefill_alternatives) > min(MAX_ALTERNATIVES, bounds.vocab_size):
        return f"at most {min(MAX_ALTERNATIVES, bounds.vocab_size)} alternatives can be given"
    return find_sampling_fault(submit.sampling, bounds)


def find_speculation_fault(submit: pb.Submit, bounds: Bounds) -> str:
    """Why nothing can be guessed like this, in a sentence; empty if it can."""
    wanted = submit.speculation
    known: dict[str, tuple[str, set[str]]] = {
        "method": (wanted.method, methods_of(bounds)),
        "schedule": (wanted.schedule, SCHEDULES),
        "verification": (wanted.verify, RULES),
    }
    for name, (word, words) in known.items():
        if word and word not in words:
            return f"{word} is no {name} of speculation here; there are: {', '.join(sorted(words))}"
    if submit.heads.digest and not (bounds.has_adapters and is_digest(submit.heads.digest)):
        return "this shard serves no adapters" if not bounds.has_adapters else "a digest of heads is 64 hex digits"
    if wanted.num_tokens > MAX_DRAFTS:
        return f"at most {MAX_DRAFTS} tokens can be guessed in a step"
    if max(submit.prediction_ids, default=0) >= bounds.vocab_size:
        return f"token id {max(submit.prediction_ids)} of the prediction is outside the vocabulary"
    return ""


def methods_of(bounds: Bounds) -> set[str]:
    """What can guess here."""
    found = {Method.OFF.value, Method.AUTO.value, Method.LOOKUP.value}
    if bounds.has_adapters:
        found.add(Method.MEDUSA.value)
    if bounds.has_draft_model:
        found.add(Method.DRAFT.value)
    return found


def is_digest(text: str) -> bool:
    """Whether a text can name an adapter, and with it a file."""
    return len(text) == 64 and set(text) <= HEX_DIGITS


def find_sampling_fault(sampling: pb.Sampling, bounds: Bounds) -> str:
    """Why tokens cannot be drawn like this, in a sentence; empty if they can."""
    in_range = {
        "temperature": 0 < sampling.temperature < math.inf,
        "top_p": 0 < sampling.top_p <= 1,
        "min_p": 0 <= sampling.min_p <= 1,
        "typical_p": 0 < sampling.typical_p <= 1,
        "repetition_penalty": 0 < sampling.repetition_penalty < math.inf,
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "bias_values": all(map(math.isfinite, sampling.bias_values)),
    }
    for name, is_fine in in_range.items():
        if not is_fine:
            return f"{name} is out of range"
    if len(sampling.bias_ids) != len(sampling.bias_values):
        return "bias_ids and bias_values differ in length"
    if max(sampling.bias_ids, default=0) >= bounds.vocab_size:
        return f"token id {max(sampling.bias_ids)} of the logit bias is outside the vocabulary of {bounds.vocab_size}"
    return ""


def write_update(update: StreamUpdate, heartbeat: pb.Heartbeat) -> Iterator[pb.StepOutput]:
    """The messages that tell a stream its mail, each below 4 MiB. Each is complete in itself."""
    status = update.status
    head = pb.StepOutput(
        step=status.step,
        credit=pb.Credit(
            num_requests=status.credit_requests,
            num_kv_tokens=status.credit_tokens,
            acknowledged=update.acknowledged,
        ),
        heartbeat=heartbeat,
        load=pb.Load(
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            used_pages=status.used_pages,
            cached_pages=status.cached_pages,
            step_ms=status.step_ms,
            step_tokens=status.step_tokens,
            expected_ms=status.expected_ms,
            gap_us=status.gap_us,
        ),
    )
    message = pb.StepOutput()
    message.CopyFrom(head)
    message.load.num_preempted = update.num_preempted
    for digest, (residency, reason) in update.adapters.items():
        message.adapters.add(digest=digest, residency=residency.value, reason=reason)
    if update.step_requests is not None:
        message.step_requests.CopyFrom(pb.StepRequests(ids=update.step_requests))
    size = 0
    for output in update.outputs:
        for part in cut(output):
            is_next_part = bool(message.outputs) and message.outputs[-1].id == part.key[1]
            if is_next_part or (size and size + estimate_bytes(part) > MAX_MESSAGE_BYTES):
                yield message
                message = pb.StepOutput()
                message.CopyFrom(head)
                size = 0
            message.outputs.append(write_output(part))
            size += estimate_bytes(part)
    yield message


def write_output(output: Output) -> pb.RequestOutput:
    """One request's part of a message. Only what is there is set: most outputs are one token."""
    message = pb.RequestOutput(
        id=output.key[1],
        token_ids=output.token_ids,
        sources=output.sources,
        step_ends=output.step_ends,
        logprobs=output.logprobs,
    )
    if output.num_drafted:
        message.num_drafted.extend(output.num_drafted)
        message.num_accepted = output.num_accepted
        message.draft_seconds, message.verify_seconds, message.accept_seconds = output.seconds
    if output.num_cached:
        message.num_cached_tokens = output.num_cached
    if output.finish_reason:
        message.finish_reason = output.finish_reason  # type: ignore[assignment]  # an enum of the same values
        message.error = output.error
        message.retryable = output.retryable
        message.in_step = output.in_step
    details = output.details
    if details is not None:
        message.alternative_ids.extend(details.alternative_ids)
        message.alternative_logprobs.extend(details.alternative_logprobs)
        message.prefill_logprobs.extend(details.prefill_logprobs)
        message.prefill_alternative_ids.extend(details.prefill_alternative_ids)
        message.prefill_alternative_logprobs.extend(details.prefill_alternative_logprobs)
    return message


def estimate_bytes(output: Output) -> int:
    """No less than the output takes on the wire."""
    num_items = 3 * len(output.token_ids)
    details = output.details
    if details is not None:
        num_items += len(details.alternative_ids) + len(details.prefill_logprobs) + len(details.prefill_alternative_ids)
    return BYTES_PER_ITEM * num_items + 4 * len(output.error) + 64


def cut(output: Output) -> Iterator[Output]:
    """The output itself, or several that together say the same, each small enough for a message."""
    if estimate_bytes(output) <= MAX_MESSAGE_BYTES:
        yield output
        return
    parts = [*truncate_scores(output), *truncate_tokens(output)]
    parts[0].num_cached = output.num_cached
    parts[0].num_drafted, parts[0].num_accepted = output.num_drafted, output.num_accepted
    parts[0].seconds = output.seconds
    parts[-1].finish_reason, parts[-1].error = output.finish_reason, output.error
    parts[-1].retryable, parts[-1].in_step = output.retryable, output.in_step
    yield from parts


def truncate_scores(output: Output) -> Iterator[Output]:
    """What the output says about the prompt."""
    details = output.details or Details()
    num_scores = len(details.prefill_logprobs)
    width = len(details.prefill_alternative_ids) // max(num_scores, 1)
    step = max(1, MAX_MESSAGE_BYTES // (BYTES_PER_ITEM * (1 + width)) - 64)
    for first in range(0, num_scores, step):
        scores, alternatives = slice(first, first + step), slice(first * width, (first + step) * width)
        part = Details(
            prefill_logprobs=details.prefill_logprobs[scores],
            prefill_alternative_ids=details.prefill_alternative_ids[alternatives],
            prefill_alternative_logprobs=details.prefill_alternative_logprobs[alternatives],
        )
        yield Output(output.key, details=part)


def truncate_tokens(output: Output) -> Iterator[Output]:
    """The tokens of the output."""
    details = output.details or Details()
    num_tokens = len(output.token_ids)
    width = len(details.alternative_ids) // max(num_tokens, 1)
    step = max(1, MAX_MESSAGE_BYTES // (BYTES_PER_ITEM * (3 + width)) - 64)
    for first in range(0, num_tokens, step):
        tokens, alternatives = slice(first, first + step), slice(first * width, (first + step) * width)
        yield Output(
            output.key,
            output.token_ids[tokens],
            output.sources[tokens],
            output.step_ends[tokens],
            output.logprobs[tokens],
            Details(details.alternative_ids[alternatives], details.alternative_logprobs[alternatives]),
        )

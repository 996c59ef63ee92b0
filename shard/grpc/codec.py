"""Converts the wire's messages to the shard's types and back, and validates what routers send.

Runs in the gRPC thread, and depends on no state of the shard beyond its fixed bounds.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import (
    FIRST_VIRTUAL_ID,
    Composition,
    Grammar,
    LogprobParams,
    Method,
    Pooling,
    SamplingParams,
    Speculation,
)
from lorikeet.proto.shares import LEAST_WEIGHT, MOST_WEIGHT
from lorikeet.shard.grpc.streams import (
    DETAILS,
    Commands,
    Details,
    Output,
    Refusal,
    Status,
    StepDetail,
    StreamUpdate,
    TokenColumns,
)
from lorikeet.shard.requests.request import PooledRows, Request, Rows

MAX_MESSAGE_BYTES = 3 << 20
"""Estimated size at which a message is split; the wire's limit is 4 MiB."""
BYTES_PER_ITEM = 10
"""Upper bound for a token id, a log probability or a flag; an alternative counts as two items."""
HEX_DIGITS = frozenset("0123456789abcdef")

Params = TypeVar("Params", SamplingParams, LogprobParams, Speculation)


def common_fields(kind: Any, message: Any) -> tuple[str, ...]:
    """Names of the fields that a dataclass shares with a message."""
    return tuple(field.name for field in fields(kind) if field.name in message.DESCRIPTOR.fields_by_name)


LOAD = tuple(name for name in common_fields(Status, pb.Load) if name != "num_preempted")


def pick(source: object, names: tuple[str, ...]) -> dict[str, Any]:
    """The named attributes, as keyword arguments."""
    return {name: getattr(source, name) for name in names}


@dataclass(frozen=True)
class Bounds:
    """Limits of every request."""

    vocab_size: int
    max_total_tokens: int
    num_kv_tokens: int
    has_adapters: bool = False
    has_draft_model: bool = False
    pooling: PooledRows | None = None
    """What requests to a model end with that generates no text; None for one that generates."""
    task: str = ""
    """Task of a model that generates no text."""
    is_whole: bool = False
    """Whether a prompt is computed in one step, so that every token can have a result."""


def read_command(epoch: int, command: pb.Command, bounds: Bounds) -> Commands:
    """Validate a router's message. A request that cannot run becomes a Refusal; no bad value raises an error."""
    return Commands(
        epoch=epoch,
        submits=[read_submit(epoch, submit, bounds) for submit in command.submits],
        abort_ids=list(command.abort_ids),
        prefetches=[adapter.digest for adapter in command.prefetches if is_digest(adapter.digest)],
        pins=[(pin.digest, pin.pinned) for pin in command.pins if is_digest(pin.digest)],
        unloads=[digest for digest in command.unload_digests if is_digest(digest)],
        watch_s=command.watch_ms / 1000,
    )


def read_submit(epoch: int, submit: pb.Submit, bounds: Bounds) -> Request | Refusal:
    """One request, or the reason why it cannot run."""
    key = (epoch, submit.id)
    try:
        return _read_request(key, submit, bounds)
    except ValueError as error:
        return Refusal(key, str(error))


def _read_request(key: tuple[int, int], submit: pb.Submit, bounds: Bounds) -> Request:
    """Raises ValueError for a request that cannot run."""
    prompt_ids = list(submit.prompt_ids)
    num_virtual = submit.num_virtual
    pooling = Pooling.from_wire(submit)
    check_lengths(submit, prompt_ids, bounds)
    check_task(pooling, submit.max_new_tokens, len(prompt_ids), bounds)
    check_adapters(submit, bounds)
    return Request(
        key=key,
        token_ids=[*range(FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + num_virtual), *prompt_ids],
        num_prompt=num_virtual + len(prompt_ids) - submit.num_emitted,
        num_virtual=num_virtual,
        num_scored=num_virtual,
        max_new_tokens=submit.max_new_tokens,
        sampling=read_params(SamplingParams, submit, bounds),
        logprobs=read_params(LogprobParams, submit, bounds),
        stop_ids=frozenset(submit.stop_ids),
        adapter_digest=submit.adapter.digest,
        composition=Composition.from_wire(submit),
        adapter_start=submit.adapter_start,
        heads_digest=submit.heads.digest,
        given_heads_digest=submit.heads.digest,
        learner=submit.learning_tenant,
        cache_salt=submit.cache_salt,
        tenant=submit.tenant,
        caller=submit.caller or f"stream {key[0]}",
        share=read_share(submit.share),
        num_held=submit.num_held,
        deadline=time.monotonic() + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        speculation=read_speculation(submit, bounds),
        isolation_steps=submit.isolation_steps,
        grammar=Grammar.from_wire(submit),
        pooling=rows_of(pooling, bounds.pooling),
    )


def read_share(share: float) -> float:
    """A caller's weight. Raises ValueError."""
    if not share:
        return 1.0
    if not LEAST_WEIGHT <= share <= MOST_WEIGHT:
        raise ValueError(f"share must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, not {share:g}")
    return share


def read_params(params: type[Params], submit: pb.Submit, bounds: Bounds) -> Params:
    """Raises ValueError for values outside their ranges."""
    read = params.from_wire(submit)
    read.check(bounds.vocab_size)
    return read


def read_speculation(submit: pb.Submit, bounds: Bounds) -> Speculation:
    """Raises ValueError for speculation that this shard cannot do."""
    method, supported = submit.speculation.method, methods_of(bounds)
    if method and method not in supported:
        names = ", ".join(sorted(supported))
        raise ValueError(f"this shard does not support the speculation method {method}; supported: {names}")
    return read_params(Speculation, submit, bounds)


def methods_of(bounds: Bounds) -> set[str]:
    """The speculation methods that this shard supports."""
    missing = ([] if bounds.has_adapters else [Method.MEDUSA]) + ([] if bounds.has_draft_model else [Method.DRAFT])
    return {method.value for method in Method if method not in missing}


def rows_of(pooling: Pooling | None, rows: PooledRows | None) -> PooledRows | None:
    """The rows that a request ends with; `rows` is what other requests to the model end with."""
    if pooling is None or rows is None:
        return None
    return PooledRows(Rows.ALL if pooling.per_token else rows.rows, pooling.second_text)


def check_lengths(submit: pb.Submit, prompt_ids: list[int], bounds: Bounds) -> None:
    """Raises ValueError for a prompt or an output that does not fit."""
    if not prompt_ids:
        raise ValueError("the prompt is empty")
    if max(prompt_ids) >= bounds.vocab_size:
        raise ValueError(f"token id {max(prompt_ids)} of the prompt is outside the vocabulary of {bounds.vocab_size}")
    if submit.num_emitted >= len(prompt_ids):
        raise ValueError("num_emitted leaves no token of the prompt")
    if submit.max_new_tokens <= submit.num_emitted:
        raise ValueError("max_new_tokens leaves nothing to generate")
    total = submit.num_virtual + len(prompt_ids)
    if bounds.pooling is None:
        total += submit.max_new_tokens - submit.num_emitted
    if total > bounds.max_total_tokens:
        raise ValueError(f"prompt and max_new_tokens make {total} tokens; this shard takes {bounds.max_total_tokens}")
    if total > bounds.num_kv_tokens:
        raise ValueError(f"prompt and max_new_tokens make {total} tokens; the KV memory holds {bounds.num_kv_tokens}")


def check_task(pooling: Pooling | None, max_new_tokens: int, num_tokens: int, bounds: Bounds) -> None:
    """Raises ValueError for a request for something else than the model computes."""
    if bounds.pooling is None:
        if pooling is not None:
            raise ValueError("this shard's model generates text: it computes no vectors")
        return
    if pooling is None or pooling.task != bounds.task:
        task = pooling.task if pooling is not None and pooling.task else "generation"
        raise ValueError(f"this shard's model is of the task {bounds.task}, not of {task}")
    if max_new_tokens != 1:
        raise ValueError("max_new_tokens of a request for a vector must be 1")
    if pooling.per_token and not bounds.is_whole:
        raise ValueError("this shard computes a prompt in several steps: there is no result for every token")
    if pooling.second_text >= num_tokens:
        raise ValueError("second_text is after the end of the prompt")


def check_adapters(submit: pb.Submit, bounds: Bounds) -> None:
    """Raises ValueError for an adapter or heads that this shard cannot load."""
    if submit.HasField("adapter"):
        _check_digest(submit.adapter.digest, bounds)
    if (composition := Composition.from_wire(submit)) is not None:
        composition.check()
        for digest in composition.digests:
            _check_digest(digest, bounds)
        if not submit.HasField("adapter"):
            raise ValueError("a sum of adapters needs a digest of its own")
    if submit.num_virtual and (submit.adapter_start or not submit.HasField("adapter")):
        raise ValueError("virtual tokens need an adapter, which applies from the first token on")
    if submit.adapter_start and not (
        submit.HasField("adapter") and submit.adapter_start < len(submit.prompt_ids) - submit.num_emitted
    ):
        raise ValueError("adapter_start must be a position of the prompt, and needs an adapter")
    if submit.heads.digest:
        _check_digest(submit.heads.digest, bounds)


def _check_digest(digest: str, bounds: Bounds) -> None:
    if not bounds.has_adapters:
        raise ValueError("this shard serves no adapters")
    if not is_digest(digest):
        raise ValueError("the digest of an adapter or heads must be 64 hex digits")


def is_digest(text: str) -> bool:
    """Whether a text is a well-formed digest, and so safe as a file name."""
    return len(text) == 64 and set(text) <= HEX_DIGITS


def write_update(update: StreamUpdate, heartbeat: pb.Heartbeat, takes_columns: bool = False) -> Iterator[pb.StepOutput]:
    """The messages of an update, each below 4 MiB and each complete in itself. takes_columns: whether the router reads
    `TokenColumns`.
    """
    status = update.status

    def head() -> pb.StepOutput:
        return pb.StepOutput(
            step=status.step,
            credit=pb.Credit(
                num_requests=status.credit_requests,
                num_kv_tokens=status.credit_tokens,
                acknowledged=update.acknowledged,
            ),
            heartbeat=heartbeat,
            load=pb.Load(**pick(status, LOAD)),
            learning=status.learning,
        )

    message = head()
    message.load.num_preempted = update.num_preempted
    for digest in update.adapters.unloaded:
        message.adapters.add(digest=digest, residency=pb.AdapterState.ABSENT)
    for digest, (residency, reason) in update.adapters.states.items():
        message.adapters.add(digest=digest, residency=residency.value, reason=reason)
    if update.step_requests is not None:
        message.step_requests.CopyFrom(pb.StepRequests(ids=update.step_requests))
    if update.step_detail is not None:
        message.step_detail.CopyFrom(_write_detail(update.step_detail))
    size = 0
    for output in update.outputs if takes_columns else update.request_outputs():
        if isinstance(output, TokenColumns):
            added = BYTES_PER_ITEM * ((3 + 2 * output.num_alternatives) * len(output.token_ids) + 4 * len(output.ids))
            if message.outputs or (size and size + added > MAX_MESSAGE_BYTES):  # a message's columns come first
                yield message
                message, size = head(), 0
            write_columns(output, message.columns.add())
            size += added
            continue
        for part in split(output):
            is_next_part = bool(message.outputs) and message.outputs[-1].id == part.key[1]
            if is_next_part or (size and size + estimate_bytes(part) > MAX_MESSAGE_BYTES):
                yield message
                message, size = head(), 0
            message.outputs.append(write_output(part))
            size += estimate_bytes(part)
    yield message


def _write_detail(detail: StepDetail) -> pb.StepDetail:
    ids, num_tokens, num_drafts = zip(*detail.computed, strict=True) if detail.computed else ((), (), ())
    return pb.StepDetail(ids=ids, num_tokens=num_tokens, num_drafts=num_drafts, preempted_ids=detail.preempted_ids)


def write_columns(columns: TokenColumns, message: pb.TokenColumns) -> None:
    """Fill an empty message."""
    message.ids.extend(columns.ids.tolist())
    message.token_ids.extend(columns.token_ids.tolist())
    if columns.logprobs is not None:
        message.logprobs.extend(columns.logprobs.tolist())
    if columns.alternative_ids is not None and columns.alternative_logprobs is not None:
        message.alternative_ids.extend(columns.alternative_ids.ravel().tolist())
        message.alternative_logprobs.extend(columns.alternative_logprobs.ravel().tolist())
    if (drafts := columns.drafts) is not None:
        message.num_tokens.extend(drafts.num_tokens.tolist())
        message.sources = drafts.sources.tobytes()
        message.num_drafted.extend(drafts.num_drafted.tolist())
        message.num_accepted.extend(drafts.num_accepted.tolist())
        message.draft_sources = drafts.draft_sources.tobytes()
        message.seconds.extend(drafts.seconds)


def write_output(output: Output) -> pb.RequestOutput:
    """One request's part of a message. Empty fields are left unset: most outputs are one token."""
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
    if output.pooled:
        message.pooled = output.pooled
    if output.num_cached:
        message.num_cached_tokens = output.num_cached
    if output.finish_reason:
        message.finish_reason = output.finish_reason  # type: ignore[assignment]  # an enum of the same values
        message.error = output.error
        message.retryable = output.retryable
        message.in_step = output.in_step
    if output.details is not None:
        for name in DETAILS:
            getattr(message, name).extend(getattr(output.details, name))
    return message


def estimate_bytes(output: Output) -> int:
    """An upper bound for the output's size on the wire."""
    num_items = 3 * len(output.token_ids)
    details = output.details
    if details is not None:
        num_items += len(details.alternative_ids) + len(details.prefill_logprobs) + len(details.prefill_alternative_ids)
        num_items += len(details.prefill_ranks)
    return BYTES_PER_ITEM * num_items + 4 * len(output.error) + len(output.pooled) + 64


def split(output: Output) -> Iterator[Output]:
    """The output itself, or equivalent smaller ones, each small enough for a message."""
    if estimate_bytes(output) <= MAX_MESSAGE_BYTES:
        yield output
        return
    parts = [*split_scores(output), *split_tokens(output), *split_pooled(output)]
    parts[0].num_cached = output.num_cached
    parts[0].num_drafted, parts[0].num_accepted = output.num_drafted, output.num_accepted
    parts[0].seconds = output.seconds
    parts[-1].finish_reason, parts[-1].error = output.finish_reason, output.error
    parts[-1].retryable, parts[-1].in_step = output.retryable, output.in_step
    yield from parts


def split_scores(output: Output) -> Iterator[Output]:
    """The output's log probabilities of the prompt."""
    details = output.details or Details()
    num_scores = len(details.prefill_logprobs)
    width = len(details.prefill_alternative_ids) // max(num_scores, 1)
    step = max(1, MAX_MESSAGE_BYTES // (BYTES_PER_ITEM * (2 + width)) - 64)
    for first in range(0, num_scores, step):
        scores, alternatives = slice(first, first + step), slice(first * width, (first + step) * width)
        part = Details(
            prefill_logprobs=details.prefill_logprobs[scores],
            prefill_alternative_ids=details.prefill_alternative_ids[alternatives],
            prefill_alternative_logprobs=details.prefill_alternative_logprobs[alternatives],
            prefill_ranks=details.prefill_ranks[scores],
        )
        yield Output(output.key, details=part)


def split_pooled(output: Output) -> Iterator[Output]:
    """The output's vector or scores."""
    step = MAX_MESSAGE_BYTES // 2
    for first in range(0, len(output.pooled), step):
        yield Output(output.key, pooled=output.pooled[first : first + step])


def split_tokens(output: Output) -> Iterator[Output]:
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

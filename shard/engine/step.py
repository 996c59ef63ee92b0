"""One launched step: from the shares of a plan to the model's inputs, and from what it gave to outputs.

Between launch and commit nothing here is read by the host, so a step may be launched before the last one is committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lorikeet.shard.batch.inputs import HeadsRow, Segment, StepInputs
from lorikeet.shard.batch.transfer import HostCopy, to_device
from lorikeet.shard.engine.stopwatch import Phase, Stopwatch
from lorikeet.shard.grpc.outbox import DRAFTED, NO_SECONDS, Details, Output
from lorikeet.shard.sampling import HostPromptLogprobs, HostSampled, PromptLogprobs, Sampled, Sampler
from lorikeet.shard.scheduler.request import FinishReason, Request, Source
from lorikeet.shard.scheduler.scheduled_request import ScheduledRequest

STEP_END = b"\1"
NO_SPAN = range(0)


@dataclass
class Step:
    """A plan on its way through the device."""

    number: int
    shares: list[ScheduledRequest]
    started: float
    """time.monotonic() of the launch."""
    sampled: Sampled | None = None
    """One row per token that is sampled, in order of shares and positions."""
    scores: PromptLogprobs | None = None
    """One row per prompt token whose log probability is wanted, in order of shares."""
    head_ids: HostCopy | None = None
    """[E] what heads guess after the sampled tokens, in order of shares, positions and heads."""
    watch: Stopwatch | None = None
    """Of a step with drafts."""
    error: str = ""
    """Why the step gave nothing."""
    is_to_be_repeated: bool = False
    """Whether its requests are computed again, in smaller steps."""

    @property
    def num_tokens(self) -> int:
        return sum(share.num_tokens for share in self.shares)

    def seconds(self) -> tuple[float, float, float]:
        """What proposing, verifying and accepting took, where the step had drafts. Waits for the step."""
        if self.watch is None:
            return NO_SECONDS
        told = self.watch.seconds()
        return sum(self.draft_seconds()), told[Phase.VERIFY], told[Phase.ACCEPT]

    def draft_seconds(self) -> tuple[float, float]:
        """What the draft model's first pass took, and its others. Waits for the step."""
        told = {} if self.watch is None else self.watch.seconds()
        return told.get(Phase.FIRST_DRAFT, 0.0), told.get(Phase.DRAFT, 0.0)


@dataclass
class Layout:
    """Where the shares of a step lie in its flat row of T tokens, as host lists."""

    input_ids: list[int] = field(default_factory=list)
    device_indices: list[int] = field(default_factory=list)
    """Indices into T whose token only the device knows …"""
    device_rows: list[int] = field(default_factory=list)
    """… and the rows of device state that hold it."""
    sample_indices: list[int] = field(default_factory=list)
    """Indices into T after which a token is sampled."""
    score_indices: list[int] = field(default_factory=list)
    """Indices into T whose logits score the prompt token that follows."""
    target_ids: list[int] = field(default_factory=list)
    """Those prompt tokens."""
    num_score_alternatives: int = 0
    heads: list[HeadsRow] = field(default_factory=list)
    """What heads are to guess after sampled tokens."""

    def add(self, share: ScheduledRequest) -> None:
        """Append a share."""
        request = share.request
        self.input_ids += request.token_ids[share.start : share.end]
        if share.end > len(request.token_ids):
            self.device_indices.append(len(self.input_ids))
            self.device_rows.append(request.row)
            self.input_ids.append(0)
        offset = len(self.input_ids) - share.end
        if share.samples:
            self.input_ids += share.draft_ids
            if share.num_heads:
                rows = range(len(self.sample_indices), len(self.sample_indices) + share.num_sampled)
                self.heads += [HeadsRow(row, request.heads_slot, share.num_heads) for row in rows]
            self.sample_indices += range(offset + share.end - 1, len(self.input_ids))
        if request.logprobs.prefill and (span := scored_span(share)):
            self.score_indices += range(span.start + offset, span.stop + offset)
            self.target_ids += request.token_ids[span.start + 1 : span.stop + 1]
            self.num_score_alternatives = max(self.num_score_alternatives, request.logprobs.prefill_alternatives)


def scored_span(share: ScheduledRequest) -> range:
    """Positions of the share whose logits are wanted for the prompt token that follows."""
    request = share.request
    if not request.logprobs.prefill:
        return NO_SPAN
    return range(max(share.start, request.num_scored), min(share.end, request.num_prompt - 1))


def fill_inputs(inputs: StepInputs, layout: Layout, shares: list[ScheduledRequest], sampler: Sampler) -> None:
    """Tell the model what comes: one flat row of tokens, those of the last step straight from the device."""
    device = inputs.device
    input_ids = to_device(torch.tensor(layout.input_ids, dtype=torch.long), device)
    if layout.device_indices:
        places = torch.tensor([layout.device_indices, layout.device_rows], dtype=torch.long)
        indices, rows = to_device(places, device)
        input_ids.index_copy_(0, indices, sampler.last_tokens.index_select(0, rows))
    host_rows = layout.sample_indices + layout.score_indices
    logits_rows = to_device(torch.tensor(host_rows, dtype=torch.long), device)
    segments = [Segment(share.start, share.num_tokens, share.request.page_ids, share.request.slot) for share in shares]
    inputs.fill(segments, input_ids, logits_rows, host_rows, layout.heads)


def agreed(share: ScheduledRequest, sampled: HostSampled, row: int) -> list[int]:
    """The target's tokens up to the first that is no draft: rows `row` … of the step's samples. None at all if the
    first row's logits are bad; where a later row's are, the tokens before it.
    """
    token_ids: list[int] = []
    for index in range(share.num_sampled):
        if sampled.bad[row + index]:
            break
        token_ids.append(sampled.token_ids[row + index])
        if index < len(share.draft_ids) and token_ids[-1] != share.draft_ids[index]:
            break
    return token_ids


def token_output(
    share: ScheduledRequest, sampled: HostSampled, row: int, num_taken: int, seconds: tuple[float, float, float]
) -> Output:
    """What a share gives whose first `num_taken` tokens were committed, from row `row` of the step's samples on;
    `seconds` are those of the step's phases.
    """
    request, params = share.request, share.request.logprobs
    rows = slice(row, row + num_taken)
    output = Output(
        request.key,
        sampled.token_ids[rows],
        sources(share, sampled.token_ids[rows]),
        bytes(num_taken - 1) + STEP_END,
        sampled.logprobs[rows] if params.wanted else [],
        finish_reason=request.finish_reason,
    )
    if share.draft_ids:
        output.num_drafted = tuple(len(share.draft_ids) if share.source is source else 0 for source in DRAFTED)
        output.num_accepted = num_accepted(share, output.token_ids)
        output.seconds = seconds
    if params.alternatives:
        output.details = Details()
        for ids, logprobs in zip(sampled.alternative_ids[rows], sampled.alternative_logprobs[rows], strict=True):
            output.details.alternative_ids += ids
            output.details.alternative_logprobs += logprobs
    if request.num_cached:
        output.num_cached, request.num_cached = request.num_cached, 0
    request.num_emitted += num_taken
    return output


def num_accepted(share: ScheduledRequest, token_ids: Sequence[int]) -> int:
    """Drafts among the emitted tokens of a share."""
    return sum(token_id == draft_id for token_id, draft_id in zip(token_ids, share.draft_ids, strict=False))


def sources(share: ScheduledRequest, token_ids: Sequence[int]) -> bytes:
    """Where each emitted token of a share came from."""
    request, num_drafted = share.request, len(share.draft_ids)
    accepted = num_accepted(share, token_ids)
    if not num_drafted:
        found = [Source.TARGET]
    else:
        own = Source.BONUS if accepted == num_drafted else Source.RESAMPLE
        found = [share.source] * accepted + [own] * (len(token_ids) - accepted)
    if request.num_output == len(token_ids):  # not after a preemption, nor where an earlier run has emitted some
        found[0] = Source.PREFILL
    return bytes(found)


def score_output(share: ScheduledRequest, span: range, scores: HostPromptLogprobs, first: int) -> Output:
    """What a committed share says about the prompt: rows `first` … of the step's scores."""
    request = share.request
    request.num_scored = span.stop
    rows = slice(first, first + len(span))
    num_alternatives = request.logprobs.prefill_alternatives
    details = Details(prefill_logprobs=scores.logprobs[rows])
    for ids, logprobs in zip(scores.alternative_ids[rows], scores.alternative_logprobs[rows], strict=True):
        details.prefill_alternative_ids += ids[:num_alternatives]
        details.prefill_alternative_logprobs += logprobs[:num_alternatives]
    return Output(request.key, details=details)


def error_output(request: Request, error: str, retryable: bool) -> Output:
    """The end of a request that failed."""
    return Output(request.key, finish_reason=FinishReason.ERROR, error=error, retryable=retryable)

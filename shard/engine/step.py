"""One launched step: from the scheduled requests to the model's inputs, and from its results to outputs.

Between launch and commit the host reads nothing here, so a step may be launched before the last one is committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.shard.batch.device_tokens import DeviceTokens
from lorikeet.shard.batch.inputs import NO_HEADS, HeadsRow, HeadsRows, StepInputs
from lorikeet.shard.batch.row_groups import as_array
from lorikeet.shard.batch.segments import Segment, Segments
from lorikeet.shard.batch.transfer import HostCopy, to_device
from lorikeet.shard.grammar.masks import GrammarMasks
from lorikeet.shard.grpc.streams import STEP_END, ColumnDrafts, Details, Output, TokenColumns
from lorikeet.shard.requests.request import FinishReason, Request, Rows, ScheduledRequest, Source
from lorikeet.shard.sampling import HostPromptLogprobs, HostSampled, PromptLogprobs, Sampled, SampledColumns, Sampler
from lorikeet.shard.sampling.drafting import DraftDraws
from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.report import prompt_logprobs
from lorikeet.shard.scheduler.decoding import Committed, DecodeStep, OutputGroup
from lorikeet.shard.scheduler.scheduler import StepPlan
from lorikeet.shard.speculation.costs import Load
from lorikeet.shard.speculation.device.device_drafts import MOST_DRAFTS, NO_TOKEN, StepDrafts, device_sources
from lorikeet.shard.speculation.length import NetworkLoad
from lorikeet.shard.system.timing import PhaseTimer


class Part(NamedTuple):
    """Where the results of one scheduled request are."""

    item: ScheduledRequest
    sampled: range
    """Rows of the step's samples."""
    scored: range = range(0)
    """Rows of the step's scores."""
    heads: range = range(0)
    """Entries of the step's `head_ids`, `item.num_heads` for each sampled row."""
    pooled: range = range(0)
    """Rows of the step's vectors or scores."""
    on_device: int = -1
    """Index of the drafts that the device made, -1 without."""

    def accepted_ids(self, sampled: HostSampled) -> list[int]:
        """The target's tokens up to the first that is no draft. Empty if the first row's logits are bad; where a later
        row's are, the tokens before it.
        """
        token_ids: list[int] = []
        draft_ids = self.item.draft_ids
        for index, row in enumerate(self.sampled):
            if sampled.bad[row]:
                break
            token_ids.append(sampled.token_ids[row])
            if index >= len(draft_ids) or token_ids[-1] != draft_ids[index]:
                break
        return token_ids

    def token_output(self, sampled: HostSampled, num_taken: int, seconds: tuple[float, float, float]) -> Output:
        """The output of a request whose first `num_taken` sampled tokens were committed; `seconds` were spent drafting,
        verifying and accepting.
        """
        item, request, params = self.item, self.item.request, self.item.request.logprobs
        rows = slice(self.sampled.start, self.sampled.start + num_taken)
        token_ids = sampled.token_ids[rows]
        output = Output(
            request.key,
            token_ids,
            sources(item, token_ids),
            bytes(num_taken - 1) + STEP_END,
            sampled.logprobs[rows] if params.wanted else [],
            finish_reason=request.finish_reason,
        )
        if item.draft_ids:
            output.num_drafted = _by_source(item.source, len(item.draft_ids))
            output.num_accepted = num_accepted(item, token_ids)
            output.seconds = seconds
        if params.alternatives:
            ids, logprobs = sampled.alternative_ids[rows], sampled.alternative_logprobs[rows]
            output.details = Details(list(chain.from_iterable(ids)), list(chain.from_iterable(logprobs)))
        if request.num_cached:
            output.num_cached, request.num_cached = request.num_cached, 0
        return output

    def score_output(self, scores: HostPromptLogprobs) -> Output:
        """The log probabilities of the prompt tokens that a committed step scored for a request."""
        request = self.item.request
        request.num_scored = scored_span(self.item).stop
        rows = slice(self.scored.start, self.scored.stop)
        num_alternatives = request.logprobs.prefill_alternatives
        details = Details(prefill_logprobs=scores.logprobs[rows])
        if request.logprobs.prefill_ranks:
            details.prefill_ranks = scores.ranks[rows]
        for ids, logprobs in zip(scores.alternative_ids[rows], scores.alternative_logprobs[rows], strict=True):
            details.prefill_alternative_ids += ids[:num_alternatives]
            details.prefill_alternative_logprobs += logprobs[:num_alternatives]
        return Output(request.key, details=details)

    def pooled_output(self, rows: torch.Tensor) -> Output:
        """The end of a request with a vector or scores. rows: [S, size] float32, those of the step."""
        request = self.item.request
        output = Output(request.key, finish_reason=request.finish_reason)
        output.pooled = rows[self.pooled.start : self.pooled.stop].numpy().astype("<f4").tobytes()
        if request.num_cached:
            output.num_cached, request.num_cached = request.num_cached, 0
        return output


@dataclass
class Layout:
    """The flat row of T tokens of a step: the newest token of each request that only decodes, then host lists. All
    indices into T and S count from the first of all.
    """

    decode: DecodeStep | None = None
    """The first n tokens, after each of which one is sampled: its members' newest ones and their drafts."""
    input_ids: list[int] = field(default_factory=list)
    device_indices: list[int] = field(default_factory=list)
    """Indices into T, of requests that do not only decode, whose token only the device knows."""
    device_rows: list[int] = field(default_factory=list)
    """Rows of device state that hold these tokens."""
    sample_indices: list[int] = field(default_factory=list)
    """Indices into T after which a token is sampled."""
    score_indices: list[int] = field(default_factory=list)
    """Indices into T whose logits score the prompt token that follows."""
    target_ids: list[int] = field(default_factory=list)
    """Those prompt tokens."""
    num_score_alternatives: int = 0
    pooled_indices: list[int] = field(default_factory=list)
    """Indices into T whose hidden states make vectors or scores."""
    listed_heads: list[HeadsRow] = field(default_factory=list)
    """Draft tokens that heads propose after sampled tokens of requests that do not only decode."""
    num_heads: int = 0
    """Draft tokens that heads propose, for all requests."""
    parts: list[Part] = field(default_factory=list)
    on_device: StepDrafts = field(default_factory=StepDrafts)
    """Requests whose drafts the device makes."""
    sampled_rows: list[int] = field(default_factory=list)
    """Row of device state of each other request for which the step samples."""

    @property
    def all_sampled_rows(self) -> list[int]:
        """Row of device state of each request for which the step samples."""
        if self.decode is None:
            return self.sampled_rows
        row_list = self.decode.members.row_list
        return row_list + self.sampled_rows if self.sampled_rows else row_list

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """The layout of a plan whose drafts are known, or at least their number."""
        decode = plan.decode
        layout = cls(decode)
        if decode is not None and len(drafting := decode.members.drafting):
            rows, sources = decode.members.rows[drafting], device_sources(decode.sources[drafting])
            of_tokens = decode.firsts[drafting], decode.widths[drafting]
            of_heads = decode.first_heads[drafting], decode.num_heads[drafting]
            layout.on_device.decoding = np.array([drafting, rows, *of_tokens, sources, *of_heads], np.int64)
        if decode is not None and decode.has_heads:
            layout.num_heads = int(decode.counts @ decode.num_heads)
        for item in plan.scheduled:
            layout.add(item)
        return layout

    @cached_property
    def num_decoding(self) -> int:
        """n."""
        return 0 if self.decode is None else self.decode.num_tokens

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts."""
        is_decode_drafted = self.decode is not None and self.decode.has_drafts
        return is_decode_drafted or len(self.sample_indices) > len(self.sampled_rows)

    @property
    def network_load(self) -> NetworkLoad:
        """What heads and a draft model computed."""
        drawn = [(part.item.end, part.item.num_drawn) for part in self.parts if part.item.num_drawn]
        num_drawn, num_attended = len(drawn), sum(end for end, _ in drawn)
        most = max((number for _, number in drawn), default=0)
        if self.decode is not None and (passes := self.decode.passes) is not None:
            is_drawn = passes.num_drawn > 0
            num_drawn, num_attended = num_drawn + int(is_drawn.sum()), num_attended + int(passes.ends[is_drawn].sum())
            most = max(most, int(passes.num_drawn.max()))
        return NetworkLoad(self.num_heads > 0, num_drawn, num_attended, most)

    @property
    def heads(self) -> HeadsRows:
        """Draft tokens that heads propose after sampled tokens."""
        decode = self.decode
        if decode is None or not decode.has_heads:
            return as_array(self.listed_heads) if self.listed_heads else NO_HEADS
        counts = np.where(decode.num_heads > 0, decode.counts, 0)
        owners = np.repeat(np.arange(len(counts)), counts)
        rows = np.arange(self.num_decoding)[np.repeat(decode.num_heads > 0, decode.counts)]
        of_decoding = np.stack([rows, decode.members.heads_slots[owners], decode.num_heads[owners]], axis=1)
        return np.concatenate([of_decoding.astype(np.int32), as_array(self.listed_heads)])

    @property
    def drafted_rows(self) -> list[int]:
        """Row of device state of each request with drafts."""
        rows = [part.item.request.row for part in self.parts if part.item.draft_ids]
        decode = self.decode
        if decode is not None and decode.has_drafts:
            rows += decode.members.rows[decode.widths > 0].tolist()
        return rows

    @property
    def num_sampled(self) -> int:
        """S."""
        return self.num_decoding + len(self.sample_indices)

    def add(self, item: ScheduledRequest) -> None:
        """Append a request's tokens."""
        request, num_decoding = item.request, self.num_decoding
        self.input_ids += request.token_ids[item.start : item.end]
        if item.end > len(request.token_ids):
            self.device_indices.append(num_decoding + len(self.input_ids))
            self.device_rows.append(request.row)
            self.input_ids.append(0)
        offset = num_decoding + len(self.input_ids) - item.end
        if item.samples:
            self.input_ids += item.draft_ids
        sampled = range(self.num_sampled, self.num_sampled + item.num_sampled)
        self.sample_indices += range(offset + item.end - 1, offset + item.end - 1 + item.num_sampled)
        heads = range(self.num_heads, self.num_heads + item.num_sampled * item.num_heads)
        if heads:
            self.listed_heads += [HeadsRow(row, request.heads_slot, item.num_heads) for row in sampled]
            self.num_heads = heads.stop
        if sampled and request.drafts_on_device:
            self._add_on_device(item, sampled, heads)
        if sampled:
            self.sampled_rows.append(request.row)
        scored = range(0)
        if request.logprobs.prefill and (span := scored_span(item)):
            scored = range(len(self.score_indices), len(self.score_indices) + len(span))
            self.score_indices += range(span.start + offset, span.stop + offset)
            self.target_ids += request.token_ids[span.start + 1 : span.stop + 1]
            self.num_score_alternatives = max(self.num_score_alternatives, request.logprobs.prefill_alternatives)
        pooled = range(0)
        if request.pooling is not None:
            rows, first = pooled_rows(item), len(self.pooled_indices)
            self.pooled_indices += range(rows.start + offset, rows.stop + offset)
            pooled = range(first, len(self.pooled_indices))
        on_device = len(self.on_device) - 1 if sampled and request.drafts_on_device else -1
        self.parts.append(Part(item, sampled, scored, heads, pooled, on_device))

    def _add_on_device(self, item: ScheduledRequest, sampled: range, heads: range) -> None:
        step, row = self.on_device, item.request.row
        of_heads = heads.start, item.num_heads if heads else 0
        num_before = len(self.sampled_rows) + (0 if self.decode is None else len(self.decode.members))
        source = step.add(num_before, row, sampled, item.source, of_heads)
        first = self.num_decoding + len(self.input_ids) - len(item.draft_ids)
        step.inputs += [(first + depth, source, row, depth) for depth in range(len(item.draft_ids))]


def scored_span(item: ScheduledRequest) -> range:
    """Scheduled positions whose logits score the prompt token that follows."""
    request = item.request
    if not request.logprobs.prefill:
        return range(0)
    return range(max(item.start, request.num_scored), min(item.end, request.num_prompt - 1))


def pooled_rows(item: ScheduledRequest) -> range:
    """Positions whose hidden states make the vector or the scores of a request that the step completes."""
    pooling = item.request.pooling
    if pooling is None or not item.samples:
        return range(0)
    if pooling.rows is Rows.ALL:
        return range(item.start, item.end)
    position = 0 if pooling.rows is Rows.FIRST else item.end - 1
    return range(position, position + 1)


NO_DRAFTS, NO_LENGTHS = np.empty((0, MOST_DRAFTS), np.int64), np.empty(0, np.int64)


@dataclass(frozen=True)
class HostResults:
    """What a step gave, on the host."""

    columns: SampledColumns | None
    """Of each sampled row; None for a step without one."""
    scores: HostPromptLogprobs
    # [E] tokens of heads
    head_ids: npt.NDArray[np.int64]
    # [S, size] float32
    pooled: torch.Tensor
    # [S, H], of requests whose outputs heads are learned from
    hidden: torch.Tensor | None = None
    draft_ids: npt.NDArray[np.int64] = field(default_factory=lambda: NO_DRAFTS)
    """[n, MOST_DRAFTS] drafts of each request of `Layout.on_device`, NO_TOKEN where the device had none."""
    match_lengths: npt.NDArray[np.int64] = field(default_factory=lambda: NO_LENGTHS)
    """[n] of the matches that their next drafts continue."""

    @cached_property
    def sampled(self) -> HostSampled:
        """The values of `columns`, as Python values."""
        return HostSampled([], [], [], [], []) if self.columns is None else self.columns.to_lists()


@dataclass(frozen=True)
class StepResults:
    """What a step gives, on the device until `to_host`."""

    sampled: Sampled | None = None
    """One row per sampled token, in order of requests and positions."""
    scores: PromptLogprobs | None = None
    """One row per scored prompt token, in order of requests."""
    head_ids: HostCopy | None = None
    """[E] draft tokens of heads after the sampled tokens, in order of requests, positions and heads."""
    drafts: HostCopy | None = None
    """`Emitted.report` of the requests of `layout.on_device`."""
    pooled: HostCopy | None = None
    """[S, size] float32 vectors or scores, in order of requests."""
    # [S, H], of requests whose outputs heads are learned from
    hidden: torch.Tensor | None = None

    def to_host(self) -> HostResults:
        """Waits for the step."""
        drafts = (NO_DRAFTS, NO_LENGTHS)
        if self.drafts is not None:
            [report] = self.drafts.wait()
            drafts = report[:, :MOST_DRAFTS].numpy(), report[:, MOST_DRAFTS].numpy()
        return HostResults(
            self.sampled.wait() if self.sampled else None,
            self.scores.to_host() if self.scores else HostPromptLogprobs([], [], [], []),
            self.head_ids.wait()[0].numpy() if self.head_ids else NO_LENGTHS,
            self.pooled.wait()[0] if self.pooled else torch.empty(0, 0),
            self.hidden,
            *drafts,
        )


@dataclass(frozen=True)
class Step:
    """A plan that was launched: what it gives, or why it failed."""

    number: int
    plan: StepPlan
    load: Load
    started: float
    """time.monotonic() of the launch."""
    timer: PhaseTimer
    """Measures steps with drafts."""
    layout: Layout = field(default_factory=Layout)
    results: StepResults = field(default_factory=StepResults)
    error: str = ""
    """Why the step failed."""
    is_retried: bool = False
    """Whether its requests are computed again, in smaller steps."""

    def to_host(self) -> HostResults:
        """Waits for the step."""
        return self.results.to_host()


class _Columns(NamedTuple):
    """The flat row of some requests of a step: T of its tokens, S of which logits are wanted."""

    segments: Segments
    input_ids: npt.NDArray[np.int64]
    """[T] as far as the host knows them."""
    logits_rows: npt.NDArray[np.int64]
    """[S] indices into the T tokens of the step."""
    device_indices: npt.NDArray[np.int64]
    """[n] indices into the T tokens of the step, of tokens that only the device knows."""
    device_places: npt.NDArray[np.int64]
    """[n] where it has them."""

    def then(self, later: "_Columns") -> "_Columns":
        """These, and `later` after them."""
        arrays = (np.concatenate(both) for both in zip(self[1:], later[1:], strict=True))
        return _Columns(self.segments.then(later.segments), *arrays)


def fill_inputs(inputs: StepInputs, layout: Layout, sampler: Sampler, is_masked: bool) -> None:
    """Describe the step to the model: one flat row of tokens, those of the last step straight from the device.
    is_masked: whether a grammar masks some of its logits.
    """
    if layout.decode is None:
        columns = _listed_columns(layout, sampler, inputs.page_size)
    else:
        columns = _decoding_columns(layout.decode, sampler)
        if layout.parts:
            columns = columns.then(_listed_columns(layout, sampler, inputs.page_size))
    segments, input_ids, logits_rows, indices, places = columns
    on_device = DeviceTokens(indices, places, sampler.device_tokens) if len(indices) else None
    sampled_rows = layout.all_sampled_rows
    if is_masked or layout.has_drafts or not sampler.can_sample_in_graph(sampled_rows):
        sampled_rows = []
    ids, rows = torch.from_numpy(input_ids), torch.from_numpy(logits_rows)
    inputs.fill(segments, ids, rows, logits_rows, layout.heads, on_device, sampled_rows)


def _listed_columns(layout: Layout, sampler: Sampler, page_size: int) -> _Columns:
    """Of the requests that do not only decode."""
    drafts = layout.on_device.inputs
    places = layout.device_rows + [sampler.device_drafts.place(*draft) for _, *draft in drafts]
    return _Columns(
        Segments.of([_segment(part.item) for part in layout.parts], page_size),
        np.array(layout.input_ids, np.int64),
        np.array(layout.sample_indices + layout.score_indices + layout.pooled_indices, np.int64),
        np.array(layout.device_indices + [index for index, *_ in drafts], np.int64),
        np.array(places, np.int64),
    )


def _decoding_columns(decode: DecodeStep, sampler: Sampler) -> _Columns:
    """Of those that do. The device may know newer tokens than the host, and has the drafts that it made."""
    rows, ids, every = decode.members.rows, decode.input_ids, np.arange(decode.num_tokens)
    indices, places = decode.firsts[decode.ahead], rows[decode.ahead]
    if decode.has_drafts:
        ids = np.zeros(decode.num_tokens, np.int64)
        ids[decode.firsts] = decode.input_ids
        owners = np.repeat(np.arange(len(rows)), decode.counts)
        depths = every - decode.firsts[owners] - 1
        is_drafted = depths >= 0
        if len(decode.host_ids):
            known = np.zeros(len(rows), bool)
            known[decode.members.host_drafting] = True
            is_known = is_drafted & known[owners]
            ids[is_known] = decode.host_ids[owners[is_known], depths[is_known]]
            is_drafted &= ~is_known
        drafted = np.flatnonzero(is_drafted)
        drafted_by = device_sources(decode.sources[owners[drafted]])
        draft_places = sampler.device_drafts.place(drafted_by, rows[owners[drafted]], depths[drafted])
        indices, places = np.concatenate([indices, drafted]), np.concatenate([places, draft_places])
    return _Columns(_decoding_segments(decode), ids, every, indices, places)


def _decoding_segments(decode: DecodeStep) -> Segments:
    members, counts, uncertain = decode.members, decode.counts, decode.num_uncertain
    return Segments.decoding(
        decode.starts, members.slots, members.slot_starts, decode.page_table, counts, uncertain, members.rows
    )


def until_end(draft_ids: list[int]) -> list[int]:
    """The drafts before the first place that has none."""
    return draft_ids[: draft_ids.index(NO_TOKEN)] if NO_TOKEN in draft_ids else draft_ids


def verify(
    layout: Layout,
    logits: torch.Tensor,
    inputs: StepInputs,
    sampler: Sampler,
    masks: GrammarMasks,
    draws: DraftDraws | None,
) -> StepResults:
    """Sample the target's token at every wanted position, those of drafts included, and start what else follows the
    forward pass. logits: [S + M + E, V], of sampled tokens, scored prompt tokens and heads' drafts; draws: the draft
    model's drafts in this step.
    """
    num_sampled, num_scored = layout.num_sampled, len(layout.score_indices)
    scores, sampled = logits[num_sampled : num_sampled + num_scored], None
    if inputs.is_sampled and inputs.bounds is not None:
        sampled = sampler.take_from_graph(num_sampled, inputs.bounds.num_wanted)
    elif num_sampled:
        masks.apply(logits[:num_sampled])
        sampled = _sample(layout, logits[:num_sampled], inputs.next_positions, sampler, draws)
    # [E]
    head_ids = arg_max(logits[num_sampled + num_scored :]) if layout.num_heads else None
    drafts = None
    if layout.on_device and sampled is not None:
        drafts = sampler.device_drafts.advance(layout.on_device, sampled.token_ids, sampled.bad, head_ids)
    scored = None
    if layout.target_ids:
        target_ids = to_device(torch.tensor(layout.target_ids, dtype=torch.long), logits.device)
        scored = prompt_logprobs(scores, target_ids, layout.num_score_alternatives)
    return StepResults(
        sampled,
        scored,
        None if head_ids is None else HostCopy(head_ids),
        None if drafts is None else HostCopy(drafts),
        HostCopy(logits[num_sampled + num_scored :]) if layout.pooled_indices else None,
    )


def _sample(
    layout: Layout, logits: torch.Tensor, positions: torch.Tensor, sampler: Sampler, draws: DraftDraws | None
) -> Sampled:
    """The target's tokens at all sampled positions. logits: [S, V]; positions: [≥ S]."""
    decode, rows = layout.decode, layout.all_sampled_rows
    if not layout.has_drafts:
        return sampler.sample(logits, rows, positions)
    items = [part.item for part in layout.parts if part.sampled]
    if sampler.can_verify_independently(rows, layout.drafted_rows):
        counts = np.array([item.num_sampled for item in items], np.int64)
        if decode is not None:
            counts = np.concatenate([decode.counts, counts])
        return sampler.verify_independently(logits, rows, counts, positions)
    drafts, firsts = [item.draft_ids for item in items], [item.end for item in items]
    if decode is not None:
        firsts = [*(decode.starts + 1).tolist(), *firsts]
        drafts = [[0] * width for width in decode.widths.tolist()] + drafts
        for index in np.flatnonzero(decode.widths[decode.members.host_drafting]).tolist():
            at = int(decode.members.host_drafting[index])
            drafts[at] = decode.host_ids[at, : decode.widths[at]].tolist()
    return sampler.verify(logits, rows, firsts, drafts, draws, layout.on_device, positions)


def _segment(item: ScheduledRequest) -> Segment:
    request = item.request
    where = (item.start, item.num_tokens, request.page_ids, request.slot, request.adapter_start)
    if item.num_uncertain:
        return Segment(*where, num_uncertain=item.num_uncertain, device_row=request.row)
    if (pooling := request.pooling) is None:
        return Segment(*where)
    return Segment(*where, pooling.second_text, pooling.per_token)


def num_accepted(item: ScheduledRequest, token_ids: Sequence[int]) -> int:
    """Draft tokens among the emitted tokens of a request."""
    last = len(token_ids) - 1  # those before it are drafts, it may be one
    return last + (last < len(item.draft_ids) and token_ids[last] == item.draft_ids[last]) if token_ids else 0


@lru_cache(1024)
def _by_source(source: int, number: int) -> tuple[int, ...]:
    """A number of drafts of one source, as `Output.num_drafted`."""
    return tuple(number if source == other else 0 for other in BY_VALUE)


def sources(item: ScheduledRequest, token_ids: Sequence[int]) -> bytes:
    """Where each emitted token of a request came from."""
    num_drafted, accepted = len(item.draft_ids), num_accepted(item, token_ids)
    found: list[int] = [Source.TARGET]
    if num_drafted:
        own = Source.BONUS if accepted == num_drafted else Source.RESAMPLE
        found = [item.source] * accepted + [own] * (len(token_ids) - accepted)
    if item.request.num_output == len(token_ids):  # not after a preemption, nor where an earlier run has emitted some
        found[0] = Source.PREFILL
    return bytes(found)


def decoded_columns(
    group: OutputGroup, sampled: SampledColumns, continues: npt.NDArray[np.bool_] | None
) -> TokenColumns:
    """The outputs of a group of requests that only decode. sampled: of the step; continues: [n] the requests that have
    an output here, None for all.
    """
    indices, ids = group.indices, group.ids
    if continues is not None:
        kept = continues[indices]
        indices, ids = indices[kept], ids[kept]
    columns = TokenColumns(group.epoch, ids, sampled.token_ids[indices])
    if group.has_logprobs:
        columns.logprobs = sampled.logprobs[indices]
    if k := group.num_alternatives:
        columns.alternative_ids = sampled.alternative_ids[indices, :k]
        columns.alternative_logprobs = sampled.alternative_logprobs[indices, :k]
    return columns


def drafted_columns(
    group: OutputGroup,
    decode: DecodeStep,
    sampled: SampledColumns,
    committed: Committed,
    seconds: tuple[float, float, float],
) -> TokenColumns:
    """`decoded_columns` of a step with drafts, which took `seconds` to draft, verify and accept."""
    kept = committed.continues[group.indices]
    indices, ids = group.indices[kept], group.ids[kept]
    num_taken, num_drafted = committed.num_taken[indices], committed.num_drafted[indices]
    num_accepted = num_taken - 1
    ends = np.cumsum(num_taken)
    # [tokens]
    depths = np.arange(num_taken.sum()) - np.repeat(ends - num_taken, num_taken)
    rows = np.repeat(decode.firsts[indices], num_taken) + depths
    own = np.where(num_accepted == num_drafted, Source.BONUS, Source.RESAMPLE)
    own[num_drafted == 0] = Source.TARGET
    draft_sources = decode.sources[indices].astype(np.uint8)
    sources = np.repeat(draft_sources, num_taken)
    sources[ends - 1] = own
    columns = TokenColumns(group.epoch, ids, sampled.token_ids[rows])
    columns.drafts = ColumnDrafts(num_taken, sources, num_drafted, num_accepted, draft_sources, seconds)
    if group.has_logprobs:
        columns.logprobs = sampled.logprobs[rows]
    if k := group.num_alternatives:
        columns.alternative_ids = sampled.alternative_ids[rows, :k]
        columns.alternative_logprobs = sampled.alternative_logprobs[rows, :k]
    return columns


def error_output(request: Request, error: str, retryable: bool) -> Output:
    """The end of a request that failed."""
    return Output(request.key, finish_reason=FinishReason.ERROR, error=error, retryable=retryable)

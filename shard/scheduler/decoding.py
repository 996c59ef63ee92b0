"""The running requests that only decode, as arrays: a step of them costs no Python per request.

A request decodes if its next step is its newest token and nothing about it is decided by the host: no grammar, and no
prompt to score. Its drafts are those of `draft_rows.py`. It joins after a commit, and leaves when it ends or when
something else is to be done with it. While it is here its counts are those of the arrays, and those of `Request` are
behind: `leave` brings them up to date. Its tokens, its pages and their numbers of owners are always current. Imports no
torch.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lorikeet.shard.requests.request import UNCONSTRAINED, Request, ScheduledRequest
from lorikeet.shard.scheduler.draft_rows import NO_SOURCES, DraftRows, NetworkStates, RowSources
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.speculation.costs import Load
from lorikeet.shard.speculation.draft_model import Passes
from lorikeet.shard.speculation.drafter import DraftSettings, RowDrafts, RowOffers
from lorikeet.shard.speculation.states import NO_STATE

MAX_ALTERNATIVES = 20
"""A request with more alternatives per token is not here: its outputs may need several messages."""
NO_TOKEN = -1
NO_ROW_IDS = np.empty(0, np.int64)
NO_IDS = np.empty((0, 0), np.int64)

Numbers = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class OutputGroup:
    """Requests of one stream whose outputs have the same fields."""

    epoch: int
    has_logprobs: bool
    num_alternatives: int
    indices: Indices
    """[n] their indices among the requests of the step."""
    ids: npt.NDArray[np.uint64]
    """[n] their ids within the stream."""


@dataclass(frozen=True, eq=False)
class Members:
    """The requests of steps: one object for as long as they are the same."""

    rows: Indices
    """[n] rows of device state, ascending."""
    row_list: list[int]
    requests: list[Request]
    texts: list[list[int]]
    """The known tokens of each."""
    keys: frozenset[tuple[int, int]]
    slots: Numbers
    """[n] slot of the adapter, -1 for none."""
    heads_slots: Numbers
    """[n] slot of the heads, -1 for none."""
    slot_starts: Numbers
    """[n] position of the first token that the adapter applies to."""
    admissions: Indices
    """[n] as `Request.admission`."""
    drafting: Indices
    """[m] indices of those whose drafts the device makes."""
    host_drafting: Indices
    """[m] indices of those whose drafts the host makes."""
    with_draft_model: Indices
    """[m] indices of those for which a draft model may draft."""
    with_heads: Indices
    """[m] indices of those for which heads may draft."""
    looking_up: Indices
    """[m] indices of those whose drafts the host looks up."""
    pausing: Indices
    """[m] indices of those that are here because so many requests run that none has drafts of the host."""
    groups: Sequence[OutputGroup] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def undrafted(self) -> tuple[Numbers, Indices, Indices, Indices]:
        """`widths`, `draft_states`, `sources` and `num_heads` of a step without drafts."""
        zeros = np.zeros(len(self), np.int64)
        return zeros.astype(np.int32), np.full(len(self), NO_STATE), zeros, zeros

    @property
    def has_drafting(self) -> bool:
        """Whether a step may have drafts."""
        return bool(len(self.drafting) or len(self.host_drafting))


@dataclass(eq=False)
class DecodeStep:
    """The newest token of each member, and draft tokens after it."""

    members: Members
    starts: Numbers
    """[n] position of the newest token if the step before accepts no draft; the sampled one is at the next."""
    page_table: Numbers
    """[n, most pages] their pages; of those with fewer, any pages after their own."""
    input_ids: Indices
    """[n] the newest tokens that the host knows."""
    ahead: Indices
    """[m] indices of those of which the device may know newer ones: a step with them is launched and not committed."""
    num_uncertain: Numbers
    """[n] drafts that the step before may accept: each moves `starts` by one."""
    widths: Numbers
    """[n] draft tokens."""
    draft_states: Indices
    """[n] as `ScheduledRequest.draft_state`."""
    sources: Indices
    """[n] what proposed the drafts."""
    num_heads: Indices
    """[n] as `ScheduledRequest.num_heads`."""
    host_ids: Indices = field(default_factory=lambda: NO_IDS)
    """[n, most] draft tokens that the host knows, NO_TOKEN where there is none."""
    has_drafts: bool = False
    has_heads: bool = False
    """Whether any `num_heads` is set."""
    taking_in: Indices = field(default_factory=lambda: NO_ROW_IDS)
    """[k] indices of the requests of which the draft model takes in the newest tokens, and draws what follows …"""
    draft_starts: Indices = field(default_factory=lambda: NO_ROW_IDS)
    """[k] … and position of the first of these."""
    is_dissolved: bool = False
    """Whether its requests left before it was launched, and are planned like others."""
    made_items: dict[int, ScheduledRequest] = field(default_factory=dict)
    """Parts of requests that left while the step was launched, by index."""

    @property
    def num_tokens(self) -> int:
        """Tokens, after each of which one is sampled."""
        return len(self.starts) + (int(self.widths.sum()) if self.has_drafts else 0)

    @cached_property
    def counts(self) -> Indices:
        """[n] tokens of each request."""
        return self.widths.astype(np.int64) + 1

    @cached_property
    def firsts(self) -> Indices:
        """[n] index of each request's first token among those of the step."""
        firsts: Indices = np.cumsum(self.counts) - self.counts if self.has_drafts else np.arange(len(self.starts))
        return firsts

    @cached_property
    def first_heads(self) -> Indices:
        """[n] index of the first token of heads of each request among those of the step."""
        num_ids = self.counts * self.num_heads
        firsts: Indices = np.cumsum(num_ids) - num_ids
        return firsts

    @cached_property
    def passes(self) -> Passes | None:
        """What the draft model computes for its requests, None for nothing."""
        at = self.taking_in
        if not len(at):
            return None
        texts, ends = [self.members.texts[index] for index in at.tolist()], self.starts[at] + np.int64(1)
        rows, num_drawn = self.members.rows[at], self.widths[at].astype(np.int64)
        return Passes(texts, self.page_table[at], self.draft_starts, ends, rows, num_drawn)

    def take_drawn(self, ids_by_row: Mapping[int, list[int]]) -> None:
        """The draft model has drawn these tokens, by row of device state."""
        most = self.host_ids.shape[1]
        for index in self.taking_in[self.widths[self.taking_in] > 0].tolist():
            ids = ids_by_row[self.members.row_list[index]]
            self.host_ids[index] = ids + [NO_TOKEN] * (most - len(ids))

    @property
    def load(self) -> Load:
        """What it computes."""
        num_requests = len(self.starts)
        if not self.has_drafts:
            return Load(num_requests, num_requests, int(self.starts.sum()) + num_requests)
        num_attended = self.counts * (2 * self.starts + 2 + self.widths) // 2
        return Load(num_requests, self.num_tokens, int(num_attended.sum()))

    def item(self, index: int) -> ScheduledRequest:
        """One request's part, when the step before is committed."""
        item = self.made_items.get(index)
        return item or self.make_item(index, len(self.members.requests[index].token_ids) - 1, 0)

    def make_item(self, index: int, start: int, num_uncertain: int) -> ScheduledRequest:
        """One request's part, from a position on."""
        request = self.members.requests[index]
        item = ScheduledRequest(request, start, start + 1, True, num_uncertain=num_uncertain)
        item.num_heads = int(self.num_heads[index])
        if width := int(self.widths[index]):
            item.source, item.draft_state = int(self.sources[index]), int(self.draft_states[index])
            item.is_on_device = request.drafts_on_device
            item.draft_ids = [0] * width if item.is_on_device else self.host_ids[index, :width].tolist()
        if len(taking_in := np.flatnonzero(self.taking_in == index)):
            item.draft_start, item.draft_end = int(self.draft_starts[taking_in[0]]), item.end
        return item

    def index_of(self, request: Request) -> int:
        """The request's index, -1 if the step does not have it."""
        index = int(np.searchsorted(self.members.rows, request.row))
        is_here = index < len(self.members) and self.members.requests[index] is request
        return index if is_here else -1


@dataclass(frozen=True)
class VerifiedDrafts:
    """What the device tells of the rows of a step whose drafts it makes."""

    ids: npt.NDArray[np.int64]
    """[m, most drafts] those that were verified, NO_TOKEN where there was none."""
    match_lengths: npt.NDArray[np.int64]
    """[m] of the match that the next drafts continue, 0 without one."""


@dataclass(frozen=True)
class Committed:
    """The requests of a step that continue, and their tokens."""

    continues: Flags
    """[n] whether each request goes on; the others ended by this step, or were not here any more."""
    num_taken: Indices = field(default_factory=lambda: NO_ROW_IDS)
    """[n] tokens of each, those of the others undefined; empty without drafts."""
    num_drafted: Indices = field(default_factory=lambda: NO_ROW_IDS)
    """[n] drafts that were verified; empty without."""
    draft_pages: list[int] = field(default_factory=list)
    """Pages whose KV of the draft model is complete from now on."""


class DecodingRequests:
    """The arrays are indexed by row of device state."""

    def __init__(self, max_running: int, cache: KvCache, drafts: DraftSettings) -> None:
        self._cache = cache
        self.drafts = DraftRows(max_running, drafts.ngram_long, drafts.history)
        self._requests: list[Request | None] = [None] * max_running
        self._is_member = np.zeros(max_running, bool)
        # [max_running] each
        self._lengths: Indices = np.zeros(max_running, np.int64)
        """Committed tokens: prompt and output."""
        self._in_flight: Indices = np.zeros(max_running, np.int64)
        """Launched steps that are not committed; each samples a token."""
        self._limits: Indices = np.zeros(max_running, np.int64)
        """Tokens at which the request ends: prompt and max_new_tokens."""
        self._num_covered: Indices = np.zeros(max_running, np.int64)
        """Tokens that the request's pages hold."""
        self._published_at: Indices = np.zeros(max_running, np.int64)
        """Tokens whose KV is committed when the next page is full and can be published."""
        self._newest_ids: Indices = np.zeros(max_running, np.int64)
        """The newest committed token."""
        self._end_ids: Indices = np.full((max_running, 1), NO_TOKEN, np.int64)
        """[max_running, most end tokens of a request] tokens that end the request."""
        self._page_table: Numbers = np.zeros((max_running, 1), np.int32)
        """[max_running, most pages of a request] KV pages in the order of positions."""
        self._is_pausing: Flags = np.zeros(max_running, bool)
        """As `Members.pausing`."""
        self._admissions: Indices = np.zeros(max_running, np.int64)
        """As `Request.admission`."""
        self._num_uncertain: Indices = np.zeros(max_running, np.int64)
        """Draft tokens of the launched step that is not committed, 0 without one."""
        self._members: Members | None = None
        self._launched: list[DecodeStep] = []
        """Planned steps that are not committed, in order."""

    def __len__(self) -> int:
        return 0 if self._members is None and not self._is_member.any() else len(self.members)

    @property
    def members(self) -> Members:
        """All requests that are here."""
        if self._members is None:
            self._members = self._members_of(np.flatnonzero(self._is_member))
        return self._members

    def join(
        self,
        request: Request,
        num_uncertain: int = 0,
        sources: RowSources = NO_SOURCES,
        is_pausing: bool = False,
    ) -> None:
        """Take a running request whose newest launched step, if any, samples one token, and `num_uncertain` drafts.
        sources: what drafts for it; is_pausing: as `Members.pausing`.
        """
        row = request.row
        request.is_decoding = True
        self._requests[row] = request
        self._is_member[row] = True
        self._lengths[row], self._newest_ids[row] = len(request.token_ids), request.token_ids[-1]
        self._in_flight[row] = request.num_launched
        self._limits[row] = request.num_prompt + request.max_new_tokens
        self._published_at[row] = (request.num_published + 1) * self._cache.page_size
        self._end_ids = _widened(self._end_ids, len(request.stop_ids), NO_TOKEN)
        self._end_ids[row] = NO_TOKEN
        self._end_ids[row, : len(request.stop_ids)] = list(request.stop_ids)
        self.drafts.put(request, sources)
        self._num_uncertain[row], self._admissions[row] = num_uncertain, request.admission
        self._is_pausing[row] = is_pausing
        self._set_pages(request, 0)
        self._members = None

    def launched_items(self, request: Request) -> list[ScheduledRequest]:
        """The parts of a request in the planned steps that are not committed, in order."""
        parts = [(step, index) for step in self._launched if (index := step.index_of(request)) >= 0]
        num_before = int(self._in_flight[request.row]) - len(parts)
        for ahead, (step, index) in enumerate(parts, num_before):
            if index not in step.made_items:
                num_uncertain = int(step.num_uncertain[index]) if ahead else 0
                start = int(self._lengths[request.row]) + ahead - 1
                step.made_items[index] = step.make_item(index, start, num_uncertain)
        return [step.made_items[index] for step, index in parts]

    def leave(self, request: Request) -> None:
        """Bring the request's own counts up to date; it is a request like others from now on."""
        row = request.row
        request.is_decoding = False
        self._requests[row] = None
        self._is_member[row] = False
        request.num_launched = request.num_in_flight = int(self._in_flight[row])
        request.num_computed = len(request.token_ids) + request.num_in_flight - 1
        request.num_committed = len(request.token_ids) - 1
        if self.drafts.on_host[row]:
            request.is_draft = bool(self._num_uncertain[row])
        self.drafts.remove(request)
        self._members = None

    @property
    def host_drafts_in_flight(self) -> bool:
        """Whether a launched step has drafts of the host: how many it accepts decides what follows."""
        members = self.members
        return bool(self._num_uncertain[members.rows[members.host_drafting]].any())

    def host_offers(self) -> Indices:
        """As `DraftRows.may_draft`, of requests in flight with drafts of the host."""
        members = self.members
        rows = members.rows[members.host_drafting]
        has_room = self._num_known(rows) + 1 < self._limits[rows]
        return self.drafts.may_draft(rows[(self._in_flight[rows] > 0) & has_room])

    @property
    def awaits_commit(self) -> bool:
        """Whether a request with drafts of the device is two steps ahead: the device adds what one accepts, not two."""
        members = self.members
        return len(members.drafting) > 0 and bool((self._in_flight[members.rows[members.drafting]] > 1).any())

    def num_missing_pages(self) -> int:
        """Pages that the next step needs in addition to those that the requests have, without its drafts."""
        rows = self.members.rows
        num_beyond = self._num_known(rows) + self._num_uncertain[rows] - self._num_covered[rows]
        num_beyond = num_beyond[num_beyond > 0]
        return int((-(-num_beyond // self._cache.page_size)).sum()) if len(num_beyond) else 0

    def launch(self) -> DecodeStep | None:
        """Launch one token of each request that has one left; None if none has. Its missing pages must be available."""
        members = self.members
        known = self._num_known(members.rows)
        is_open = known < self._limits[members.rows]
        if np.count_nonzero(is_open) < len(is_open):  # the last token of some is being sampled
            members, known = self._members_of(members.rows[is_open]), known[is_open]
        rows = members.rows
        if not len(rows):
            return None
        num_uncertain = self._num_uncertain[rows]
        self._grow(members, known + num_uncertain)
        ahead = np.flatnonzero(self._in_flight[rows])
        self._in_flight[rows] += 1
        self._num_uncertain[rows] = 0
        starts, uncertain = (known - 1).astype(np.int32), num_uncertain.astype(np.int32)
        pages = self._pages(rows, known + num_uncertain)
        step = DecodeStep(members, starts, pages, self._newest_ids[rows], ahead, uncertain, *members.undrafted)
        self._launched.append(step)
        return step

    def offers(self, step: DecodeStep) -> RowOffers:
        """[n] the drafts that each request of a planned step may have."""
        members, rows = step.members, step.members.rows
        num_left: Indices = (self._limits[rows] - step.starts - 2 - step.num_uncertain).clip(min=0)
        num_left[~self._is_member[rows]] = 0
        if len(of_host := members.host_drafting):  # which must know the newest token
            num_left[of_host[self._in_flight[rows[of_host]] > 1]] = 0
        lengths = self._lengths[rows]
        offers = self.drafts.offers(rows, num_left, members.admissions, lengths, members.texts)
        if offers.networks is None or not len(members.with_draft_model):
            return offers
        at, size = offers.networks.indices, self._cache.page_size
        firsts, lasts = self.drafts.num_draft_computed[rows[at]] // size, (lengths[at] - 1) // size
        pages = np.stack([self._page_table[rows[at], each] for each in (firsts, lasts)], axis=1).astype(np.int64)
        return offers._replace(networks=offers.networks._replace(pages=pages))

    def networks(self) -> NetworkStates:
        """Of all requests that are here."""
        return self.drafts.networks(self.members.rows, self._lengths[self.members.rows])

    def num_missing_for(self, step: DecodeStep, widths: Indices) -> int:
        """Pages that these drafts need in addition to those that the requests have."""
        num_tokens = step.starts + 1 + step.num_uncertain + widths
        num_covered = self._num_covered[step.members.rows]
        return int(np.maximum(-(-(num_tokens - num_covered) // self._cache.page_size), 0).sum())

    def add_drafts(self, step: DecodeStep, drafts: RowDrafts) -> None:
        """Add drafts to a step that was just planned. There are enough pages for them."""
        widths, draft_states, sources, num_heads, taking_in = drafts
        if taking_in is not None:
            rows = step.members.rows[taking_in]
            step.taking_in, step.draft_starts = taking_in, self.drafts.num_draft_computed[rows]
            self.drafts.num_draft_computed[rows] = step.starts[taking_in] + 1
        if num_heads is not None and np.count_nonzero(num_heads):
            step.num_heads, step.has_heads = num_heads, True
            self.drafts.expect_heads(step.members.rows, num_heads)
            for index, item in step.made_items.items():
                item.expect_heads(int(num_heads[index]))
        if not np.count_nonzero(widths):
            return
        rows, num_tokens = step.members.rows, step.starts + 1 + step.num_uncertain + widths
        self._grow(step.members, num_tokens)
        self._num_uncertain[rows] = widths
        step.widths, step.draft_states, step.sources = widths.astype(np.int32), draft_states, sources
        step.has_drafts = True
        step.page_table = self._pages(rows, num_tokens)
        if len(of_host := step.members.host_drafting):
            most = np.arange(int(widths.max(initial=0)))
            step.host_ids = np.full((len(rows), len(most)), NO_TOKEN, np.int64)
            ids = self.drafts.ids_of(rows[of_host], sources[of_host], len(most))
            step.host_ids[of_host] = np.where(most < widths[of_host][:, None], ids, NO_TOKEN)

    def _grow(self, members: Members, num_tokens: Indices) -> None:
        """Give requests pages for so many tokens, [n]."""
        for index in np.flatnonzero(num_tokens > self._num_covered[members.rows]).tolist():
            request = members.requests[index]
            num_pages = len(request.page_ids)
            self._cache.grow(request, int(num_tokens[index]))
            self._set_pages(request, num_pages)

    def _pages(self, rows: Indices, num_tokens: Indices) -> Numbers:
        return self._page_table[:, : self._cache.num_needed(int(num_tokens.max()))].take(rows, axis=0)

    def commit(
        self,
        step: DecodeStep,
        token_ids: Indices,
        is_bad: Flags,
        verified: VerifiedDrafts | None = None,
        head_ids: Indices = NO_ROW_IDS,
    ) -> Committed:
        """Record the sampled tokens of the requests that continue. token_ids, is_bad: [S] of all tokens of the step;
        verified: of `members.drafting`, if there are any; head_ids: [E] the tokens of heads after the sampled ones.
        """
        self.forget(step)
        if verified is not None:
            rows = step.members.rows[step.members.drafting]
            is_here = self._is_member[rows]
            self.drafts.match_lengths[rows[is_here]] = verified.match_lengths[is_here]
        if step.has_drafts:
            committed = self._commit_drafted(step, token_ids, is_bad, verified)
        else:
            committed = Committed(self._commit_single(step, token_ids, is_bad))
        if len(step.members.with_heads):
            self._take_heads(step, committed, head_ids)
        if len(step.taking_in):
            committed = replace(committed, draft_pages=self._take_drawn(step, committed))
        return committed

    def _take_drawn(self, step: DecodeStep, committed: Committed) -> list[int]:
        """Count the tokens whose KV of the draft model is computed. Returns the pages that they complete."""
        continues = committed.continues[step.taking_in]
        indices, firsts = step.taking_in[continues], step.draft_starts[continues]
        rows, ends = step.members.rows[indices], step.starts[indices] + np.int64(1)
        if step.has_drafts:  # of a drawn token it computes the KV when it draws the next one
            ends = ends + np.minimum(committed.num_taken[indices], step.widths[indices]).clip(min=1) - 1
        self.drafts.num_draft_computed[rows] = ends
        firsts, ends = firsts // self._cache.page_size, ends // self._cache.page_size
        full = np.flatnonzero(ends > firsts)
        spans = zip(indices[full].tolist(), firsts[full].tolist(), ends[full].tolist(), strict=True)
        return [page for index, *span in spans for page in step.members.requests[index].page_ids[slice(*span)]]

    def _take_heads(self, step: DecodeStep, committed: Committed, head_ids: Indices) -> None:
        """Keep the tokens of heads after the newest token of each request that continues."""
        indices = step.members.with_heads[committed.continues[step.members.with_heads]]
        num_heads = step.num_heads[indices]
        firsts = step.first_heads[indices]
        if step.has_drafts:
            firsts = firsts + (committed.num_taken[indices] - 1) * num_heads
        places = firsts[:, None] + np.arange(int(num_heads.max(initial=0)))
        ids = (
            head_ids[np.minimum(places, len(head_ids) - 1)] if len(head_ids) else np.empty((len(indices), 0), np.int64)
        )
        self.drafts.take_heads(step.members.rows[indices], num_heads, ids)

    def forget(self, step: DecodeStep) -> None:
        """A planned step is committed, or has failed, or its requests have left."""
        self._launched = [other for other in self._launched if other is not step]

    def _commit_drafted(
        self, step: DecodeStep, token_ids: Indices, is_bad: Flags, verified: VerifiedDrafts | None
    ) -> Committed:
        members, rows = step.members, step.members.rows
        most = int(step.counts.max())
        # [n, most]
        places = np.minimum(step.firsts[:, None] + np.arange(most), len(token_ids) - 1)
        tokens, bad = token_ids[places], is_bad[places]
        draft_ids = np.full((len(rows), most - 1), NO_TOKEN, np.int64)
        if len(step.host_ids):
            draft_ids[:] = step.host_ids
        if verified is not None:
            draft_ids[members.drafting] = verified.ids[:, : most - 1]
        is_accepted = (draft_ids == tokens[:, :-1]) & ~bad[:, 1:]
        num_taken = 1 + np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
        num_drafted = np.logical_and.accumulate(draft_ids != NO_TOKEN, axis=1).sum(axis=1)
        is_taken = np.arange(most) < num_taken[:, None]
        is_end = (tokens[:, :, None] == self._end_ids[rows][:, None]).any(axis=2)
        ends = (is_end & is_taken).any(axis=1) | (self._lengths[rows] + num_taken >= self._limits[rows])
        continues = ~(ends | bad[:, 0]) & self._is_member[rows]
        here, num_here, taken, texts = rows, num_taken, tokens, members.texts
        if not continues.all():
            here, num_here, taken, is_taken = (array[continues] for array in (rows, num_taken, tokens, is_taken))
            texts = [text for text, does in zip(texts, continues.tolist(), strict=True) if does]
        emitted, stops = taken[is_taken], np.cumsum(num_here).tolist()
        parts = map(emitted.tolist().__getitem__, map(slice, [0, *stops], stops))
        deque(map(list.extend, texts, parts), maxlen=0)
        if len(members.looking_up):
            self.drafts.follow(here, num_here, emitted)
        self._newest_ids[here] = taken[np.arange(len(here)), num_here - 1]
        self._advance(here, num_here)
        # frees pages of rejected drafts; their KV in the last page is overwritten
        num_needed = self._lengths[here] + self._num_uncertain[here]
        is_long = self._num_covered[here] - num_needed >= self._cache.page_size
        for row, num_tokens in zip(here[is_long].tolist(), num_needed[is_long].tolist(), strict=True):
            self._shrink(row, num_tokens)
        return Committed(continues, num_taken, num_drafted)

    def _shrink(self, row: int, num_tokens: int) -> None:
        request = self._requests[row]
        assert request is not None
        self._cache.shrink(request, num_tokens)
        self._num_covered[row] = len(request.page_ids) * self._cache.page_size

    def _commit_single(self, step: DecodeStep, token_ids: Indices, is_bad: Flags) -> Flags:
        """token_ids, is_bad: [n]. Returns [n] as in `Committed`."""
        members, rows = step.members, step.members.rows
        ends = (self._end_ids[rows] == token_ids[:, None]).any(axis=1) | (self._lengths[rows] + 1 >= self._limits[rows])
        continues = ~(ends | is_bad) & self._is_member[rows]
        texts: Sequence[list[int]] = members.texts
        if np.count_nonzero(continues) < len(continues):
            rows, token_ids = rows[continues], token_ids[continues]
            texts = [text for text, does in zip(texts, continues.tolist(), strict=True) if does]
        deque(map(list.append, texts, token_ids.tolist()), maxlen=0)
        if len(members.looking_up):
            self.drafts.follow(rows, np.ones_like(rows), token_ids)
        self._newest_ids[rows] = token_ids
        self._advance(rows, 1)
        return continues

    def _advance(self, rows: Indices, num_tokens: Indices | int) -> None:
        """A launched step gave these rows so many tokens."""
        self._lengths[rows] += num_tokens
        self._in_flight[rows] -= 1
        self._num_uncertain[rows[self._in_flight[rows] == 0]] = 0
        if self._cache.prefix_caching:
            for row in rows[self._lengths[rows] - 1 >= self._published_at[rows]].tolist():
                self._publish(row)

    def _publish(self, row: int) -> None:
        request = self._requests[row]
        assert request is not None
        request.num_committed = len(request.token_ids) - 1
        self._cache.publish(request)
        self._published_at[row] = (request.num_published + 1) * self._cache.page_size

    def _num_known(self, rows: Indices) -> Indices:
        known: Indices = self._lengths[rows] + self._in_flight[rows]
        return known

    def _set_pages(self, request: Request, first: int) -> None:
        """Copy the request's pages from the `first` on."""
        row, page_ids = request.row, request.page_ids
        self._page_table = _widened(self._page_table, len(page_ids), 0)
        self._page_table[row, first : len(page_ids)] = page_ids[first:]
        self._num_covered[row] = len(page_ids) * self._cache.page_size

    def _members_of(self, rows: Indices) -> Members:
        requests = [request for row in rows.tolist() if (request := self._requests[row]) is not None]
        by_group: dict[tuple[int, bool, int], list[int]] = {}
        for index, request in enumerate(requests):
            key = request.key[0], request.logprobs.wanted, request.logprobs.alternatives
            by_group.setdefault(key, []).append(index)
        groups = [
            OutputGroup(*key, np.array(indices), np.array([requests[index].key[1] for index in indices], np.uint64))
            for key, indices in by_group.items()
        ]
        return Members(
            rows,
            rows.tolist(),
            requests,
            [request.token_ids for request in requests],
            frozenset(request.key for request in requests),
            np.array([request.slot for request in requests], np.int32),
            np.array([request.heads_slot for request in requests], np.int32),
            np.array([request.adapter_start for request in requests], np.int32),
            self._admissions[rows],
            np.flatnonzero(self.drafts.on_device[rows]),
            np.flatnonzero(self.drafts.on_host[rows]),
            np.flatnonzero(self.drafts.has_draft_model[rows]),
            np.flatnonzero(self.drafts.num_heads[rows]),
            np.flatnonzero(self.drafts.has_index[rows]),
            np.flatnonzero(self._is_pausing[rows]),
            groups,
        )


def may_decode(request: Request) -> bool:
    """Whether nothing about the next step of a request is decided by the host, but perhaps its drafts."""
    return (
        request.constraint is UNCONSTRAINED
        and request.pooling is None
        and not (request.finish_reason or request.learner or request.isolation_steps or request.num_cached)
        and not request.is_draft
        and request.row >= 0
        and request.num_output > 0
        and request.num_computed == request.num_known - 1
        and request.num_launched == request.num_in_flight
        and request.logprobs.alternatives <= MAX_ALTERNATIVES
    )


def _widened(table: npt.NDArray[Any], width: int, value: int) -> npt.NDArray[Any]:
    """The table with at least so many columns; new ones hold `value`."""
    if width <= table.shape[1]:
        return table
    wider = np.full((len(table), max(width, 2 * table.shape[1])), value, table.dtype)
    wider[:, : table.shape[1]] = table
    return wider

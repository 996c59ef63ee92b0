"""What drafts for the requests that only decode, and the tokens that it proposes next: arrays by row of device state.
Imports no torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.proto.params import Schedule
from lorikeet.shard.requests.request import Request, Source
from lorikeet.shard.speculation.draft_model import ALWAYS_FITS
from lorikeet.shard.speculation.drafter import NetworkOffers, RowOffers
from lorikeet.shard.speculation.history_index import HistoryIndex, Pair
from lorikeet.shard.speculation.lookup import Index
from lorikeet.shard.speculation.lookup_rows import LookupRows
from lorikeet.shard.speculation.states import NO_STATE, Indices

LOOKUP, HISTORY, NETWORK = range(3)
"""Places of the sources in the arrays."""
PLACES: Indices = np.zeros(256, np.int64)
"""The place of each source, by its value."""
PLACES[Source.HISTORY], PLACES[Source.MEDUSA], PLACES[Source.DRAFT] = HISTORY, NETWORK, NETWORK
LOOKUP_STATES, HISTORY_STATES, NETWORK_STATE, NUM_STATES = 0, 2, 4, 5
"""Columns of `DraftRows._states`: drafts from texts have a row of `DraftStates` after a match that is not long, and one
after a long one.
"""

NO_PAGES: Indices = np.empty((0, 2), np.int64)

Flags = npt.NDArray[np.bool_]


class RowSources(NamedTuple):
    """What drafts for one request."""

    has_lookup: bool = False
    text_index: Index | None = None
    """If the host looks its drafts up."""
    pair: Pair | None = None
    """Whose history proposes drafts."""
    num_heads: int = 0
    """Draft tokens of heads in a step."""
    has_draft_model: bool = False
    states: Sequence[int] = (NO_STATE,) * NUM_STATES
    """Rows of `DraftStates`, NO_STATE without such drafts and with a constant schedule."""

    @property
    def are_any(self) -> bool:
        return self.has_lookup or self.pair is not None or self.num_heads > 0 or self.has_draft_model


NO_SOURCES = RowSources()


class NetworkStates(NamedTuple):
    """Requests for which heads or a draft model may draft: arrays of m."""

    indices: Indices
    """Among all that only decode."""
    states: Indices
    """Rows of `DraftStates`, NO_STATE with a constant schedule."""
    lags: Flags
    """Whether the draft model has more to take in than after a step whose drafts were accepted."""


class DraftRows:
    """Drafts of the host, and what it knows of those of the device."""

    def __init__(self, max_rows: int, ngram_long: int, history: HistoryIndex | None) -> None:
        self._ngram_long, self._history = ngram_long, history
        # [max_rows] each
        self.on_device: Flags = np.zeros(max_rows, bool)
        """Whether the device makes drafts for the request."""
        self.on_host: Flags = np.zeros(max_rows, bool)
        """Whether the host does."""
        self.has_index: Flags = np.zeros(max_rows, bool)
        """Whether the host looks drafts up."""
        self.has_history: Flags = np.zeros(max_rows, bool)
        self.num_heads: Indices = np.zeros(max_rows, np.int64)
        """Draft tokens of heads in a step, 0 for none."""
        self.has_draft_model: Flags = np.zeros(max_rows, bool)
        self.num_draft_computed: Indices = np.zeros(max_rows, np.int64)
        """As `Request.num_draft_computed`."""
        self.match_lengths: Indices = np.zeros(max_rows, np.int64)
        """Tokens of the match that the next drafts of prompt lookup continue, 0 without one."""
        self._is_auto: Flags = np.zeros(max_rows, bool)
        """Whether the schedule is `auto`."""
        self._most_texts: Indices = np.zeros(max_rows, np.int64)
        """Draft tokens from texts in a step at most."""
        self._pairs: list[Pair | None] = [None] * max_rows
        self._lookups = LookupRows(max_rows)
        self._states: Indices = np.full((max_rows, NUM_STATES), NO_STATE, np.int64)
        self._ids: Indices = np.zeros((3, max_rows, 1), np.int64)
        """[sources, max_rows, most drafts] what each source would have verified next, where the host knows it."""
        self._num_ids: Indices = np.zeros((3, max_rows), np.int64)
        """[sources, max_rows] their number; of the device, the most that it may have."""

    def put(self, request: Request, sources: RowSources) -> None:
        """These sources draft for a request from now on."""
        row, params, has_any = request.row, request.speculation, sources.are_any
        self.on_device[row] = has_any and request.drafts_on_device
        self.on_host[row] = has_any and not request.drafts_on_device
        self.has_index[row], self.has_history[row] = sources.text_index is not None, sources.pair is not None
        self.num_heads[row], self._is_auto[row] = sources.num_heads, params.schedule is Schedule.AUTO
        self.match_lengths[row], self._most_texts[row] = request.match_length, params.num_tokens
        self._pairs[row], self._states[row] = sources.pair, sources.states
        self.has_draft_model[row], self.num_draft_computed[row] = sources.has_draft_model, request.num_draft_computed
        self._widen(max(params.num_tokens, sources.num_heads))
        self._num_ids[:, row] = 0
        self._set_heads(row, request.head_ids)
        if sources.has_draft_model:
            self._num_ids[NETWORK, row] = params.num_tokens
        if sources.text_index is not None:
            self._lookups.put(row, sources.text_index)
            self._follow(np.array([row]), np.zeros(1, np.int64), np.zeros(0, np.int64))
        elif sources.has_lookup:
            self._num_ids[LOOKUP, row] = params.num_tokens
        if self.on_host[row] and sources.text_index is None:
            self.match_lengths[row] = 0

    def remove(self, request: Request) -> None:
        """The request is one like others from now on."""
        row = request.row
        if self.num_heads[row]:
            request.head_ids = self._ids[NETWORK, row, : self._num_ids[NETWORK, row]].tolist()
        if self.has_draft_model[row]:
            request.num_draft_computed = int(self.num_draft_computed[row])
        if self.on_device[row]:
            request.match_length = int(self.match_lengths[row])
        self._lookups.put(row, None)

    def has_network(self, rows: Indices) -> Flags:
        """[n] whether heads or a draft model may draft."""
        has: Flags = (self.num_heads[rows] > 0) | self.has_draft_model[rows]
        return has

    def networks(self, rows: Indices, lengths: Indices) -> NetworkStates:
        """Those of these requests for which networks may draft. lengths: [n] their known tokens."""
        indices = np.flatnonzero(self.has_network(rows))
        rows = rows[indices]
        lags = self.has_draft_model[rows] & (lengths[indices] - self.num_draft_computed[rows] > ALWAYS_FITS)
        return NetworkStates(indices, self._states[rows, NETWORK_STATE], lags)

    def may_draft(self, rows: Indices) -> Indices:
        """Rows of `DraftStates` of all drafts that these requests of the host may have after tokens that are being
        sampled. With another schedule than `auto` they always may: NO_STATE.
        """
        if not self._is_auto[rows].all():
            return np.full(1, NO_STATE)
        of_lookup, others = self._lookup_states(rows)[self.match_lengths[rows] > 0], self._states[rows, HISTORY_STATES:]
        return np.concatenate([of_lookup, others[others != NO_STATE]])

    def offers(
        self, rows: Indices, num_left: Indices, admissions: Indices, lengths: Indices, texts: Sequence[list[int]]
    ) -> RowOffers:
        """[n] the drafts that each of these requests may have. num_left: at most; lengths, texts: known tokens."""
        widths = np.minimum(self._num_ids[LOOKUP, rows], num_left)
        widths[self.match_lengths[rows] == 0] = 0
        sources = np.full(len(rows), Source.LOOKUP, np.int64)
        offers = RowOffers(admissions, widths, self._lookup_states(rows), lengths, sources)
        with_networks, with_history = np.flatnonzero(self.has_network(rows)), np.flatnonzero(self.has_history[rows])
        if not (len(with_networks) or len(with_history)):
            return offers
        # [n] tokens of the match that drafts from texts continue
        matches = np.where(widths > 0, self.match_lengths[rows], 0)
        for index in with_history.tolist():
            self._offer_history(offers, index, int(rows[index]), int(num_left[index]), matches, texts[index])
        if not len(with_networks):
            return offers
        rows = rows[with_networks]
        of_networks = np.minimum(self._num_ids[NETWORK, rows], num_left[with_networks])
        of_networks[matches[with_networks] >= self._ngram_long] = 0
        states, by = (
            self._states[rows, NETWORK_STATE],
            np.where(self.has_draft_model[rows], Source.DRAFT, Source.MEDUSA),
        )
        networks = NetworkOffers(with_networks, of_networks, states, by, self.num_heads[rows], NO_PAGES)
        return offers._replace(networks=networks)

    def _offer_history(
        self, offers: RowOffers, index: int, row: int, num_left: int, matches: Indices, token_ids: list[int]
    ) -> None:
        """Offer what follows the request's newest tokens in earlier outputs, if that match is longer, or a long one."""
        pair, history = self._pairs[row], self._history
        assert pair is not None and history is not None
        if num_left <= 0 or matches[index] >= self._ngram_long:
            return
        draft_ids, length = history.propose(pair, token_ids, min(int(self._most_texts[row]), num_left))
        if not draft_ids or length <= matches[index]:
            return
        self._ids[HISTORY, row, : len(draft_ids)] = draft_ids
        state = self._states[row, HISTORY_STATES + (length >= self._ngram_long)]
        matches[index], offers.widths[index], offers.states[index] = length, len(draft_ids), state
        offers.sources[index] = Source.HISTORY

    def ids_of(self, rows: Indices, sources: Indices, most: int) -> Indices:
        """[n, most] what the sources propose, any tokens behind it."""
        ids: Indices = self._ids[PLACES[sources], rows, :most]
        return ids

    def follow(self, rows: Indices, counts: Indices, token_ids: Indices) -> None:
        """These rows have so many tokens more, [n]; token_ids: [T] those of all."""
        has_index = self.has_index[rows]
        if not has_index.all():
            rows, counts, token_ids = rows[has_index], counts[has_index], token_ids[np.repeat(has_index, counts)]
        if len(rows):
            self._follow(rows, counts, token_ids)

    def _follow(self, rows: Indices, counts: Indices, token_ids: Indices) -> None:
        found = self._lookups.follow(rows, counts, token_ids, self._most_texts[rows])
        self._ids[LOOKUP, rows, : found.draft_ids.shape[1]] = found.draft_ids
        self._num_ids[LOOKUP, rows], self.match_lengths[rows] = found.widths, found.match_lengths

    def expect_heads(self, rows: Indices, num_heads: Indices) -> None:
        """A step whose heads may draft for the next one is launched, [n] each."""
        num_ids = self._num_ids[NETWORK, rows]
        self._num_ids[NETWORK, rows] = np.where((num_ids == 0) & self.on_device[rows], num_heads, num_ids)

    def take_heads(self, rows: Indices, num_heads: Indices, head_ids: Indices) -> None:
        """A step gave these tokens of heads after the newest ones. head_ids: [n, most], any behind those of a row."""
        self._num_ids[NETWORK, rows] = num_heads
        self._ids[NETWORK, rows, : head_ids.shape[1]] = head_ids

    def _set_heads(self, row: int, head_ids: Sequence[int]) -> None:
        if self.num_heads[row]:
            self._num_ids[NETWORK, row] = len(head_ids)
            self._ids[NETWORK, row, : len(head_ids)] = head_ids

    def _lookup_states(self, rows: Indices) -> Indices:
        is_long = self.match_lengths[rows] >= self._ngram_long
        states: Indices = self._states[rows, LOOKUP_STATES + is_long.astype(np.int64)]
        return states

    def _widen(self, width: int) -> None:
        if width > self._ids.shape[2]:
            missing = max(width, 2 * self._ids.shape[2]) - self._ids.shape[2]
            self._ids = np.pad(self._ids, ((0, 0), (0, 0), (0, missing)))

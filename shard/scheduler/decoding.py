"""The running requests that only decode, as arrays: a step of them costs no Python per request.

A request decodes if its next step is its newest token and nothing about it is decided by the host: no drafts, no
grammar, no prompt to score. It joins after a commit, and leaves when it ends or when something else is to be done with
it. While it is here its counts are those of the arrays, and those of `Request` are behind: `leave` brings them up to
date. Its tokens, its pages and their numbers of owners are always current. Imports no torch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lorikeet.shard.requests.request import UNCONSTRAINED, Request
from lorikeet.shard.requests.scheduled_request import ScheduledRequest
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.speculation.throughput import Load

MAX_ALTERNATIVES = 20
"""A request with more alternatives per token is not here: its outputs may need several messages."""
NO_TOKEN = -1

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
    slot_starts: Numbers
    """[n] position of the first token that the adapter applies to."""
    groups: Sequence[OutputGroup] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """One token of each member."""

    members: Members
    starts: Numbers
    """[n] position of the token that is computed; the sampled one is at the next."""
    page_table: Numbers
    """[n, most pages] their pages; of those with fewer, any pages after their own."""
    input_ids: Indices
    """[n] the newest tokens that the host knows."""
    is_ahead: bool
    """Whether the device may know newer ones: a step with some of the requests is launched and not committed."""

    @property
    def load(self) -> Load:
        """What it computes."""
        num_requests = len(self.starts)
        return Load(num_requests, num_requests, int(self.starts.sum()) + num_requests)

    def item(self, index: int) -> ScheduledRequest:
        """One request's part."""
        start = int(self.starts[index])
        return ScheduledRequest(self.members.requests[index], start, start + 1, samples=True)


class DecodingRequests:
    """The arrays are indexed by row of device state."""

    def __init__(self, max_running: int, cache: KvCache) -> None:
        self._cache = cache
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
        self._members: Members | None = None

    def __len__(self) -> int:
        return 0 if self._members is None and not self._is_member.any() else len(self.members)

    @property
    def members(self) -> Members:
        """All requests that are here."""
        if self._members is None:
            self._members = self._members_of(np.flatnonzero(self._is_member))
        return self._members

    def join(self, request: Request) -> None:
        """Take a running request whose newest launched step, if any, samples one token."""
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
        self._set_pages(request, 0)
        self._members = None

    def leave(self, request: Request) -> None:
        """Bring the request's own counts up to date; it is a request like others from now on."""
        row = request.row
        request.is_decoding = False
        self._requests[row] = None
        self._is_member[row] = False
        request.num_launched = request.num_in_flight = int(self._in_flight[row])
        request.num_computed = len(request.token_ids) + request.num_in_flight - 1
        request.num_committed = len(request.token_ids) - 1
        self._members = None

    def leave_all(self) -> None:
        """Have all requests leave, as `leave` does for one."""
        for request in self.members.requests:
            self.leave(request)

    def num_missing_pages(self) -> int:
        """Pages that the next step needs in addition to those that the requests have."""
        rows = self.members.rows
        return int((self._num_known(rows) > self._num_covered[rows]).sum())

    def launch(self) -> DecodeStep | None:
        """Launch one token of each request that has one left; None if none has. Its missing pages must be available."""
        members = self.members
        known = self._num_known(members.rows)
        is_open = known < self._limits[members.rows]
        if not is_open.all():  # the last token of some is being sampled
            members, known = self._members_of(members.rows[is_open]), known[is_open]
        rows = members.rows
        if not len(rows):
            return None
        for index in np.flatnonzero(known > self._num_covered[rows]).tolist():
            request = members.requests[index]
            num_pages = len(request.page_ids)
            self._cache.grow(request, int(known[index]))
            self._set_pages(request, num_pages)
        is_ahead = bool(self._in_flight[rows].any())
        self._in_flight[rows] += 1
        pages = self._page_table[:, : self._cache.num_needed(int(known.max()))].take(rows, axis=0)
        return DecodeStep(members, (known - 1).astype(np.int32), pages, self._newest_ids[rows], is_ahead)

    def commit(self, step: DecodeStep, token_ids: Indices, is_bad: Flags) -> Flags:
        """Record the sampled tokens, [n], of the requests that continue. Returns [n] which do; the others ended by this
        step, or were not here any more.
        """
        members, rows = step.members, step.members.rows
        ends = (self._end_ids[rows] == token_ids[:, None]).any(axis=1) | (self._lengths[rows] + 1 >= self._limits[rows])
        continues = ~(ends | is_bad) & self._is_member[rows]
        texts: Sequence[list[int]] = members.texts
        if not continues.all():
            rows, token_ids = rows[continues], token_ids[continues]
            texts = [text for text, does in zip(texts, continues.tolist(), strict=True) if does]
        deque(map(list.append, texts, token_ids.tolist()), maxlen=0)
        self._newest_ids[rows] = token_ids
        self._lengths[rows] += 1
        self._in_flight[rows] -= 1
        if self._cache.prefix_caching:
            for row in rows[self._lengths[rows] - 1 >= self._published_at[rows]].tolist():
                self._publish(row)
        return continues

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
            np.array([request.adapter_start for request in requests], np.int32),
            groups,
        )


def may_decode(request: Request) -> bool:
    """Whether nothing about the next step of a request without drafts is decided by the host."""
    return (
        request.constraint is UNCONSTRAINED
        and request.pooling is None
        and not (request.finish_reason or request.learner or request.isolation_steps or request.num_cached)
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

"""What proposes draft tokens: the interface of a source, and what it offers for one step. Imports no torch.

A source is a file of this folder with one subclass of `Drafter`, a row in `lorikeet/proto/draft_sources.py`, and an
entry in `DRAFTERS` of `drafters.py`. Sources only propose: the same rule verifies the tokens of all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from lorikeet.proto.draft_sources import BY_VALUE, Cost
from lorikeet.shard.requests.request import Request, ScheduledRequest
from lorikeet.shard.speculation.history_index import HistoryIndex
from lorikeet.shard.speculation.states import NO_STATE, DraftKind, Flags, Indices


@dataclass(slots=True)
class Offer:
    """Draft tokens that a step may verify for one request."""

    request: Request
    source: int
    """The value of its row."""
    width: int
    """How many tokens at most."""
    draft_ids: list[int]
    """These tokens; empty if a network has yet to draw them."""
    draft_state: int = NO_STATE
    """Row of `DraftStates` by which their number is chosen; NO_STATE with a constant schedule."""
    is_long: bool = False
    """Whether texts had a long match. It comes before the offers of all other sources, and has its own statistics."""
    match_length: int = 0
    """Tokens of the match that the draft tokens continue; of several offers from texts, the longest match counts."""


class NetworkOffers(NamedTuple):
    """What heads or a draft model offer m requests that only decode, in place of drafts from texts."""

    indices: Indices
    """[m] the requests."""
    widths: Indices
    """[m] how many tokens at most, 0 for none."""
    states: Indices
    """[m] as `RowOffers.states`."""
    sources: Indices
    """[m] as `RowOffers.sources`."""
    num_heads: Indices
    """[m] tokens of heads that the next step may need."""
    pages: Indices
    """[m, 2] first and last page that a draft model writes before it draws."""


class RowOffers(NamedTuple):
    """Draft tokens for requests that only decode: arrays of n."""

    admissions: Indices
    """As `Request.admission`."""
    widths: Indices
    """How many tokens at most, 0 for none."""
    states: Indices
    """Rows of `DraftStates`; NO_STATE with a constant schedule."""
    lengths: Indices
    """Known tokens of the request."""
    sources: Indices
    """What proposes them."""
    networks: NetworkOffers | None = None

    @property
    def most_widths(self) -> Indices:
        """[n] how many tokens at most, of any source."""
        networks = self.networks
        if networks is None:
            return self.widths
        most = self.widths.copy()
        most[networks.indices] = np.maximum(most[networks.indices], networks.widths)
        return most

    def with_networks(self, are_tried: Flags) -> "RowOffers":
        """With the drafts of networks for requests that have some and try them, [m]."""
        networks = self.networks
        assert networks is not None
        takes = are_tried & (networks.widths > 0)
        at = networks.indices[takes]
        widths, states, sources = self.widths.copy(), self.states.copy(), self.sources.copy()
        widths[at], states[at], sources[at] = networks.widths[takes], networks.states[takes], networks.sources[takes]
        return self._replace(widths=widths, states=states, sources=sources)


NO_ROWS = RowOffers(*np.empty((5, 0), np.int64))


class RowDrafts(NamedTuple):
    """What a step computes for the drafts of requests that only decode: arrays of n."""

    widths: Indices
    """Draft tokens."""
    states: Indices
    """As `RowOffers.states`."""
    sources: Indices
    """What proposes them."""
    num_heads: Indices | None = None
    """Draft tokens of heads that are wanted after each sampled token; None without any."""
    taking_in: Indices | None = None
    """[k] indices of the requests of which the draft model takes in the newest tokens; None without any."""


@dataclass(frozen=True)
class DraftSettings:
    """What all requests of a shard have in common."""

    max_batch_size: int = 32
    """With more running requests nothing is drafted."""
    ngram_min: int = 1
    ngram_max: int = 8
    ngram_long: int = 4
    """Matched tokens from which texts come before heads and draft model, with method `auto`."""
    has_draft_model: bool = False
    history: HistoryIndex | None = None
    """The outputs of earlier requests."""
    most_on_device: int = 0
    """Maximum draft tokens of a step that the device makes for a request, 0 where the host makes all drafts."""
    fewest_rows: int = 8
    """With fewer running requests, those with drafts of the host are planned one by one: arrays take longer."""
    further: tuple[type["Drafter"], ...] = ()
    """Sources in addition to those of DRAFTERS. One with the value of another takes its place."""


@dataclass(frozen=True)
class Pages:
    """The KV pages of a shard, which a network with KV of its own shares."""

    size: int
    num_uses: Sequence[int]
    """By page: how often it was given to a request for new content."""


class Drafter:
    """One source of draft tokens, for all requests of a shard."""

    value: int
    """The value of its row."""

    @classmethod
    def make(cls, settings: DraftSettings, pages: Pages) -> Self | None:
        """The source of a shard; None where the shard does not have it."""
        return cls()

    def takes(self, request: Request) -> bool:
        """Whether it may propose for the request at all: by the request's method, and what the source needs."""
        raise NotImplementedError

    def propose(self, request: Request, room: int) -> Offer | None:
        """The next draft tokens of a request, at most `room`. Only after `takes`."""
        raise NotImplementedError

    def kinds(self, request: Request) -> Iterable[DraftKind]:
        """The groups of statistics in which its next offer may be; none if it would offer nothing."""
        return [kind_of(request, self.value)]

    def max_tokens(self, request: Request) -> int:
        """Maximum draft tokens of a step."""
        return request.speculation.num_tokens

    def drafts_on_device(self, request: Request) -> bool:
        """Whether the device can make its drafts for the request, from nothing that only the host knows."""
        return False

    def begin(self) -> None:
        """A step is planned."""

    def take_in(self, item: ScheduledRequest, is_offered: bool, num_left: int) -> int:
        """Plan what the step computes so that the source can draft, now if `is_offered`, or later. Returns how many of
        the `num_left` prompt tokens of the step it takes.
        """
        return 0

    def is_ready(self, item: ScheduledRequest) -> bool:
        """Whether what it offered for the step can be made in the step."""
        return True

    def committed(self, item: ScheduledRequest, token_ids: Sequence[int], head_ids: Sequence[int]) -> None:
        """A step is committed: these tokens follow the request's text. head_ids: what heads gave after each of them."""

    def pause(self, request: Request) -> None:
        """Steps of the request follow in which nothing drafts: what is kept of its text grows old."""

    def release(self, request: Request) -> None:
        """The request lost its pages: it has ended, or is computed again."""

    def finished(self, request: Request) -> None:
        """The request has ended without an error."""

    @property
    def is_costly(self) -> bool:
        """Whether steps compute something so that it can draft."""
        return BY_VALUE[self.value].cost is not Cost.NONE


def kind_of(request: Request, source: int, is_long: bool = False) -> DraftKind:
    """The group of statistics of drafts from a source."""
    by_heads = BY_VALUE[source].by_heads and request.heads_digest
    return (request.heads_digest if by_heads else request.adapter_digest, source, is_long)

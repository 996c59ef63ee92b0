"""All sources of draft tokens of a shard, and which of them proposes for a request. Imports no torch."""

from collections.abc import Iterable, Sequence

from lorikeet.shard.requests.request import UNCONSTRAINED, Request, ScheduledRequest
from lorikeet.shard.speculation.draft_model import DraftModelDrafter
from lorikeet.shard.speculation.drafter import Drafter, DraftSettings, Offer, Pages
from lorikeet.shard.speculation.grammar import GrammarDrafter
from lorikeet.shard.speculation.history import HistoryDrafter
from lorikeet.shard.speculation.lookup import LookupDrafter
from lorikeet.shard.speculation.medusa import MedusaDrafter
from lorikeet.shard.speculation.states import Flags, Indices

DRAFTERS: tuple[type[Drafter], ...] = (
    GrammarDrafter,
    LookupDrafter,
    HistoryDrafter,
    MedusaDrafter,
    DraftModelDrafter,
)
"""Of several offers the first long match is taken, else the first of a costly source, else the longest match."""
ROW_DRAFTERS = (LookupDrafter, HistoryDrafter, MedusaDrafter, DraftModelDrafter)
"""Those whose drafts for requests that only decode are arrays."""


class Drafters:
    """The sources of one shard."""

    def __init__(self, settings: DraftSettings, pages: Pages) -> None:
        self.settings = settings
        kinds = {kind.value: kind for kind in (*DRAFTERS, *settings.further)}
        made = [kind.make(settings, pages) for kind in kinds.values()]
        self._all = [drafter for drafter in made if drafter is not None]
        self._taking: dict[Request, tuple[int, list[Drafter]]] = {}
        """What `of` found for running requests, and for how many heads."""
        self._by_value = {drafter.value: drafter for drafter in self._all}

    def of(self, request: Request, num_running: int = 0) -> list[Drafter]:
        """The sources that may propose for a request now; not to be changed."""
        if num_running > self.settings.max_batch_size:
            return []
        known = self._taking.get(request)
        if known is None or known[0] != request.num_heads or request.constraint is not UNCONSTRAINED:
            known = request.num_heads, [drafter for drafter in self._all if drafter.takes(request)]
            self._taking[request] = known
        return known[1]

    def draft_on_device(self, request: Request) -> bool:
        """Whether the device makes the drafts of a running request. Its tokens then depend on nothing that the host
        keeps.
        """
        most, sampling = self.settings.most_on_device, request.sampling
        if not most or request.pooling is not None or request.constraint.is_constrained or sampling.depends_on_history:
            return False
        drafters = self.of(request)
        num_tokens = max((drafter.max_tokens(request) for drafter in drafters), default=0)
        return 0 < num_tokens <= most and all(drafter.drafts_on_device(request) for drafter in drafters)

    def may_decode(self, request: Request, num_running: int) -> bool:
        """Whether the request may be one of `DecodingRequests`: it has no drafts, at least now that so many requests
        run, or those of `ROW_DRAFTERS` alone.
        """
        drafters = self.of(request)
        if not drafters or self.is_pausing(request, num_running):
            return True
        is_few = num_running < self.settings.fewest_rows and not request.drafts_on_device
        return not is_few and all(isinstance(each, ROW_DRAFTERS) for each in drafters)

    def is_pausing(self, request: Request, num_running: int) -> bool:
        """Whether the host would draft for the request if fewer requests ran."""
        is_full = num_running > self.settings.max_batch_size
        return is_full and not request.drafts_on_device and bool(self.of(request))

    def pause(self, request: Request) -> None:
        """Steps of the request follow in which nothing drafts."""
        for drafter in self._all:
            drafter.pause(request)

    def begin(self) -> None:
        """A step is planned."""
        for drafter in self._all:
            drafter.begin()

    def is_ready(self, item: ScheduledRequest, offer: Offer) -> bool:
        """Whether the step can make the tokens of an offer."""
        return self._by_value[offer.source].is_ready(item)

    def committed(self, item: ScheduledRequest, token_ids: Sequence[int], head_ids: Sequence[int]) -> None:
        """A step is committed: these tokens follow the request's text. head_ids: what heads gave after each of them."""
        for drafter in self._all:
            drafter.committed(item, token_ids, head_ids)

    def take_in_rows(self, pages: Indices) -> Flags:
        """As `DraftModelDrafter.take_in_rows`."""
        drafter = self._by_value[DraftModelDrafter.value]
        assert isinstance(drafter, DraftModelDrafter)
        return drafter.take_in_rows(pages)

    def computed_rows(self, pages: Iterable[int]) -> None:
        """All of these pages have KV of the draft model."""
        drafter = self._by_value.get(DraftModelDrafter.value)
        if isinstance(drafter, DraftModelDrafter):
            drafter.computed(pages)

    def release(self, request: Request) -> None:
        """The request lost its pages."""
        self._taking.pop(request, None)
        for drafter in self._all:
            drafter.release(request)

    def finished(self, request: Request) -> None:
        """The request has ended without an error."""
        for drafter in self._all:
            drafter.finished(request)


def best_offer(drafters: Iterable[Drafter], request: Request, room: int) -> Offer | None:
    """The next drafts of the request, at most `room` tokens, up to the first that its grammar refuses. A network has
    yet to draw its tokens.
    """
    best, best_rank = None, (False, -1)
    for drafter in drafters:
        offer = drafter.propose(request, room)
        if offer is None:
            continue
        rank = (drafter.is_costly, offer.match_length)
        if offer.is_long or rank > best_rank:
            best, best_rank = offer, rank
        if offer.is_long:
            break
    if best is not None and best.draft_ids:
        best.draft_ids = best.draft_ids[: request.constraint.num_allowed(best.draft_ids)]
        best.width = len(best.draft_ids)
    return best if best is not None and best.width else None

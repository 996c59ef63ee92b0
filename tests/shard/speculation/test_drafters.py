"""Which draft source proposes for a request."""

import pytest

from lorikeet.proto.params import Method, Speculation
from lorikeet.shard.requests.request import Request, Source
from lorikeet.shard.speculation.drafter import DraftSettings, Offer, Pages
from lorikeet.shard.speculation.drafters import Drafters, best_offer
from tests.shard.rig import make_request

REPEATS = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
"""Its last four tokens stand in it twice."""
ONCE_MORE = [1, 9, 8, 7, 1]
NEW = [1, 2, 3]
HEADS = (50, 51, 52)
PAGES = Pages(4, [0] * 4)


def offer_of(request: Request, room: int, has_draft_model: bool = True) -> Offer | None:
    return best_offer(Drafters(DraftSettings(has_draft_model=has_draft_model), PAGES).of(request), request, room)


CASES = {
    "a long match goes before all": (Method.AUTO, REPEATS, HEADS, True, Source.LOOKUP, [5, 6, 1]),
    "then heads": (Method.AUTO, ONCE_MORE, HEADS, True, Source.MEDUSA, [50, 51]),
    "then the draft model": (Method.AUTO, ONCE_MORE, (), True, Source.DRAFT, []),
    "then a short match": (Method.AUTO, ONCE_MORE, (), False, Source.LOOKUP, [9, 8, 7]),
    "and else nothing": (Method.AUTO, NEW, (), False, None, []),
    "lookup alone": (Method.LOOKUP, REPEATS, HEADS, True, Source.LOOKUP, [5, 6, 1]),
    "lookup that finds nothing": (Method.LOOKUP, NEW, HEADS, True, None, []),
    "heads alone": (Method.MEDUSA, REPEATS, HEADS, True, Source.MEDUSA, [50, 51]),
    "heads without drafts": (Method.MEDUSA, REPEATS, (), True, None, []),
    "draft model alone": (Method.DRAFT, REPEATS, HEADS, True, Source.DRAFT, []),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_source_of_drafts(case: tuple[Method, list[int], tuple[int, ...], bool, Source | None, list[int]]) -> None:
    method, known, heads, has_draft_model, source, draft_ids = case
    request = make_request(1, known, 40, speculation=Speculation(method, 3, num_heads=2))
    request.num_heads, request.head_ids = len(heads), heads
    offer = offer_of(request, 30, has_draft_model)
    if source is None:
        assert offer is None
        return
    assert offer is not None
    assert (offer.source, offer.draft_ids) == (source, draft_ids)
    assert offer.width == (3 if source is Source.DRAFT else len(draft_ids))


@pytest.mark.parametrize("method", [Method.LOOKUP, Method.MEDUSA, Method.DRAFT])
def test_no_draft_exceeds_the_end_of_the_request(method: Method) -> None:
    request = make_request(1, REPEATS, 40, speculation=Speculation(method, 3, num_heads=3))
    request.num_heads, request.head_ids = 3, HEADS
    offer = offer_of(request, 1)
    assert offer is not None and offer.width == 1
    assert len(offer.draft_ids) <= 1


def test_heads_draft_where_nothing_else_is_requested() -> None:
    request = make_request(1, REPEATS, 40, speculation=Speculation(Method.AUTO, 0, num_heads=255))
    drafters = Drafters(DraftSettings(has_draft_model=True), PAGES)
    assert not drafters.of(request, num_running=1)
    request.num_heads, request.head_ids = 3, HEADS
    assert drafters.of(request, num_running=1)
    offer = offer_of(request, 30)
    assert offer is not None and offer.draft_ids == list(HEADS)

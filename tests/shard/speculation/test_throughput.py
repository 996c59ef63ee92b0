"""The widths chosen for several offers give the highest throughput of all combinations."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.shard.requests.request import Source
from lorikeet.shard.speculation.costs import Candidates, Load
from lorikeet.shard.speculation.drafter import NO_ROWS, Offer, kind_of
from lorikeet.shard.speculation.length import DraftLengthController
from tests.shard.speculation.test_length import make

OFFERS = st.lists(
    st.tuples(
        st.sampled_from([Source.DRAFT, Source.LOOKUP]), st.integers(0, 3), st.floats(0.05, 0.95), st.floats(0.1, 0.95)
    ),
    min_size=1,
    max_size=3,
)


def test_the_most_probable_come_first_and_each_offer_in_order() -> None:
    rates = np.array([(0.5, 0.5), (0.9, 0.5), (0.8, 0.8)])
    drafts = Candidates.of(rates, np.array([2, 2, 0]), np.array([True, False, True]), np.array([5, 7, 9]))
    assert list(drafts.values) == pytest.approx([0.9, 0.5, 0.45, 0.25])
    assert list(drafts.owners) == [1, 0, 1, 0]
    assert list(drafts.passes) == [0, 1, 0, 2]
    assert list(drafts.attended) == [8, 6, 9, 7]
    assert (drafts.num_offers, drafts.num_drawn) == (3, 1)


def test_offers_without_drafts_have_no_candidates() -> None:
    drafts = Candidates.of(np.array([(0.5, 0.5)]), np.array([0]), np.array([True]), np.array([9]))
    assert (len(drafts.values), drafts.num_drawn) == (0, 0)


@settings(deadline=None)
@given(OFFERS, st.lists(st.floats(0.001, 1.0), min_size=14, max_size=14), st.floats(0.001, 2.0), st.floats(0.001, 2.0))
def test_no_other_widths_give_more(
    offered: list[tuple[Source, int, float, float]], steps: list[float], first: float, further: float
) -> None:
    """Against every combination there is."""
    draft_length = DraftLengthController()
    for number, seconds in enumerate(np.cumsum(steps), 1):
        draft_length.plain.observe(number, 0, float(seconds))
    num_drawn = sum(source == Source.DRAFT and width > 0 for source, width, _, _ in offered)
    draft_length.drafting.observe(max(1, num_drawn), 0, (first, further), 2)
    drafting = [0.0, *(first + further * depth for depth in range(9))]
    offers = [Offer(make(number=i), source, width, []) for i, (source, width, _, _) in enumerate(offered)]
    rows = [draft_length.row_of(offer.request, kind_of(offer.request, offer.source)) for offer in offers]
    rates = np.array([each[2:] for each in offered])

    def rate(widths: tuple[int, ...]) -> float:
        tokens, depth = float(len(offers)), 0
        for offer, each, width in zip(offers, rates, widths, strict=True):
            tokens += sum(each[0] * each[1] ** depth for depth in range(width))
            depth = max(depth, width if offer.source == Source.DRAFT else 0)
        return tokens / (float(draft_length.plain.expected([len(offers) + sum(widths)])[0]) + drafting[depth])

    for offer, row in zip(offers, rows, strict=True):
        offer.draft_state = row
    joint, _ = draft_length._join(offers, NO_ROWS, np.empty(0, np.int64))
    found = tuple(draft_length._best(joint, Load(len(offers), len(offers)), rates).tolist())
    best = max(map(rate, itertools.product(*(range(offer.width + 1) for offer in offers))))
    assert rate(found) == pytest.approx(best)

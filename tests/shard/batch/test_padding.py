"""What steps are padded to."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from lorikeet.shard.batch.padding import DRAFTS_PER_ROW, MAX_DRAFTS, MOST_SUM_ROWS, MOST_WANTED, Padding, row_counts


@given(most=st.integers(1, 600))
def test_numbers_of_rows_rise_to_the_most(most: int) -> None:
    counts = row_counts(most)
    assert counts[-1] == most
    assert list(counts) == sorted(set(counts))
    assert all(after - before <= (max(16, before) if before < 256 else 64) for before, after in pairwise(counts))


@given(
    most=st.integers(1, 600),
    num_rows=st.integers(1, 620),
    logits=st.integers(0, 320),
    drafts=st.just(0) | st.integers(1, 1500),
    adapters=st.booleans(),
    serves_adapters=st.booleans(),
)
@example(most=512, num_rows=400, logits=60, drafts=0, adapters=False, serves_adapters=False)
@example(most=512, num_rows=400, logits=257, drafts=0, adapters=False, serves_adapters=False)
@example(most=128, num_rows=9, logits=9, drafts=0, adapters=False, serves_adapters=True)
@example(most=128, num_rows=9, logits=9, drafts=27, adapters=False, serves_adapters=True)
def test_a_step_fits_the_least_bounds_that_hold_it(
    most: int, num_rows: int, logits: int, drafts: int, adapters: bool, serves_adapters: bool
) -> None:
    padding = Padding(most, 512, 9, serves_adapters)
    found = padding.fit(num_rows, logits, drafts, adapters)
    holding = [
        bounds
        for bounds in padding.all()
        if bounds.num_rows >= num_rows
        and bounds.num_wanted >= logits
        and bounds.has_adapters >= adapters
        and (bounds.num_drafts >= drafts and (bounds.num_drafts > 0) == (drafts > 0))
    ]
    fitting = [each for each in padding.all() if each.num_rows >= num_rows and each.num_wanted >= logits]
    least = min((bounds.num_rows for bounds in fitting), default=0)
    assert all(each.num_wanted <= MOST_WANTED for each in fitting)
    if found is None:
        assert (
            not least
            or drafts > (DRAFTS_PER_ROW * least if least <= MAX_DRAFTS else 0)
            or ((adapters or drafts) and not serves_adapters)
        )
        return
    assert found in padding.all() and found in holding
    assert found.num_rows == least
    if not (adapters or drafts):
        assert not found.has_adapters, "base rows pay for no adapters"


def test_every_family_has_every_number_of_rows() -> None:
    padding = Padding(512, 4096, 0, has_adapters=True)
    num_drafted = sum(rows <= MAX_DRAFTS for rows in padding.row_counts)
    assert len(padding.all()) == len(set(padding.all())) == 2 * len(padding.row_counts) + num_drafted
    sizes = [bounds.num_logits for bounds in padding.all()]
    assert sizes[0] == MAX_DRAFTS * (1 + DRAFTS_PER_ROW)
    assert sizes == sorted(sizes, reverse=True)


def test_sums_of_adapters_have_graphs_of_their_own_up_to_some_rows() -> None:
    plain, padding = (Padding(512, 4096, 0, True, has_sums) for has_sums in (False, True))
    assert [each for each in padding.all() if not each.has_sums] == plain.all(), "others launch no kernels of sums"
    num_small = sum(rows <= MOST_SUM_ROWS for rows in padding.row_counts)
    assert len(set(padding.all())) == len(plain.all()) + 2 * num_small
    for num_drafts in (0, 3):
        found = padding.fit(MOST_SUM_ROWS, 3, num_drafts, True, has_sums=True)
        assert found in padding.all() and found is not None and found.has_sums and found.has_adapters
        assert padding.fit(MOST_SUM_ROWS + 1, 3, num_drafts, True, has_sums=True) is None
        assert plain.fit(1, 1, num_drafts, True, has_sums=True) is None

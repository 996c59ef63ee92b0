"""Which adapters count as the most used."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.adapters import loading as module
from lorikeet.router.adapters.loading import HALF_LIFE_S, Popularity


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def order(popularity: Popularity) -> list[str]:
    return [pin.digest for pin, _ in popularity.most_used()]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 3 * HALF_LIFE_S)), max_size=40))
def test_older_uses_count_less(uses: list[tuple[str, float]]) -> None:
    clock = Clock()
    popularity, exact = Popularity(clock), dict[str, float]()
    for digest, later in uses:
        clock.now += later
        exact = {name: score * 0.5 ** (later / HALF_LIFE_S) for name, score in exact.items()}
        exact[digest] = exact.get(digest, 0.0) + 1.0
        popularity.add(pb.AdapterPin(digest=digest), digest)
    assert set(order(popularity)) == set(exact)
    assert all(exact[first] >= exact[second] * (1 - 1e-6) for first, second in pairwise(order(popularity)))


def test_scores_of_years_do_not_overflow() -> None:
    clock = Clock()
    popularity = Popularity(clock)
    popularity.add(pb.AdapterPin(digest="old"), "old")
    clock.now = 10 * 365 * 86400.0
    popularity.add(pb.AdapterPin(digest="new"), "new")
    assert order(popularity) == ["new", "old"]


def test_few_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 4)
    popularity = Popularity(Clock())
    for number in range(30):
        popularity.add(pb.AdapterPin(digest=f"{number}"), "")
        popularity.add(pb.AdapterPin(digest="popular"), "")
        assert len(order(popularity)) <= 8
    assert order(popularity)[0] == "popular"
    popularity.remove("popular")
    assert "popular" not in order(popularity)

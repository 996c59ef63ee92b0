"""The page table by itself: what is shared, what is evicted first, what check() finds."""

import pytest

from lorikeet.shard.requests.request import Request
from lorikeet.shard.scheduler.kv_cache import Admission, KvCache


def make_request(token_ids: list[int], **values: str) -> Request:
    return Request(
        key=(1, 1),
        token_ids=token_ids,
        num_prompt=len(token_ids),
        max_new_tokens=8,
        adapter_digest=values.get("adapter", ""),
        cache_salt=values.get("salt", ""),
    )


def fill(cache: KvCache, token_ids: list[int], **values: str) -> Request:
    """A request whose tokens are all computed."""
    request = make_request(token_ids, **values)
    assert cache.admit(request, 0) is Admission.ADMITTED
    request.num_committed = len(token_ids)
    cache.publish(request)
    return request


def test_only_full_pages_before_the_last_token_are_shared() -> None:
    cache = KvCache(16, 4)
    owner = fill(cache, list(range(8)))
    same = make_request(list(range(8)))
    assert cache.admit(same, 0) is Admission.ADMITTED
    assert same.page_ids[:1] == owner.page_ids[:1] and same.page_ids[1] != owner.page_ids[1]
    assert same.num_computed == 4
    longer = make_request(list(range(9)))
    assert cache.admit(longer, 0) is Admission.ADMITTED
    assert longer.page_ids[:2] == owner.page_ids
    cache.check([owner, same, longer])


@pytest.mark.parametrize("other", [{"salt": "s"}, {"adapter": "d"}])
def test_adapter_and_salt_keep_pages_apart(other: dict[str, str]) -> None:
    cache = KvCache(16, 4)
    owner = fill(cache, list(range(9)))
    other_tenant = make_request(list(range(9)), **other)
    assert cache.admit(other_tenant, 0) is Admission.ADMITTED
    assert not set(owner.page_ids) & set(other_tenant.page_ids)


def test_adapter_and_salt_cannot_be_taken_for_each_other() -> None:
    cache = KvCache(16, 4)
    owner = fill(cache, list(range(9)), adapter="ab", salt="c")
    other_tenant = make_request(list(range(9)), adapter="a", salt="bc")
    assert cache.admit(other_tenant, 0) is Admission.ADMITTED
    assert not set(owner.page_ids) & set(other_tenant.page_ids)


def test_equal_pages_after_different_beginnings_are_different() -> None:
    cache = KvCache(16, 4)
    owner = fill(cache, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    other = fill(cache, [2, 2, 2, 2, 5, 6, 7, 8, 9])
    assert not set(owner.page_ids) & set(other.page_ids)


def test_the_least_recently_used_prefix_goes_first_from_its_end() -> None:
    cache = KvCache(5, 4)
    old, new = fill(cache, list(range(9))), fill(cache, [40, 41, 42, 43])
    cache.release(old)
    cache.release(new)
    assert (cache.num_available, cache.num_cached, cache.num_owned) == (5, 3, 0)
    filler = make_request([50] * 12)
    assert cache.admit(filler, 0) is Admission.ADMITTED  # two free pages and one evicted: the end of the old prefix
    again = make_request(list(range(9)))
    assert cache.admit(again, 0) is Admission.FULL
    cache.release(filler)
    assert cache.admit(again, 0) is Admission.ADMITTED
    assert again.num_computed == 4
    cache.check([again])


def test_pages_come_in_ascending_runs_again_after_a_release() -> None:
    cache = KvCache(8, 4)
    first = make_request(list(range(16)))
    cache.admit(first, 0)
    cache.release(first)
    second = make_request(list(range(20)))
    cache.admit(second, 0)
    assert second.page_ids == [0, 1, 2, 3, 4]


def test_growing_takes_all_or_nothing() -> None:
    cache = KvCache(3, 4)
    request = make_request([1])
    cache.admit(request, 0)
    assert not cache.grow(request, 13)
    assert len(request.page_ids) == 1
    assert cache.grow(request, 12)
    assert len(request.page_ids) == 3


def test_spare_pages_stay_available() -> None:
    cache = KvCache(3, 4)
    assert cache.admit(make_request(list(range(8))), 2) is Admission.FULL
    assert cache.admit(make_request(list(range(8))), 1) is Admission.ADMITTED


def test_check_names_what_leaked() -> None:
    cache = KvCache(4, 4)
    owner = fill(cache, list(range(4)))
    with pytest.raises(RuntimeError, match="owner counts"):
        cache.check([])
    owner.page_ids.append(3)
    with pytest.raises(RuntimeError, match="leaked"):
        cache.check([owner])


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        ("hash of a free page", "_hash_by_page"),
        ("cached page without hash", "_cached"),
        ("free \\+ cached \\+ owned", "_free"),
    ],
)
def test_check_names_a_page_in_two_states(fault: str, state: str) -> None:
    cache = KvCache(4, 4)
    cache.release(fill(cache, list(range(4))))
    cache.check([])
    page = cache._free[0]
    if state == "_free":
        cache._free.popleft()
    else:
        getattr(cache, state)[page] = b"hash"
    with pytest.raises(RuntimeError, match=fault):
        cache.check([])

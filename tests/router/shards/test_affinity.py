"""The router's estimate of a shard's prefix cache."""

from lorikeet.router.shards.link import BLOCK, MAX_BLOCKS, PrefixIndex, keys_of


def test_prompts_share_the_keys_of_equal_leading_blocks() -> None:
    one = keys_of([1] * (3 * BLOCK), "", "")
    other = keys_of([1] * (2 * BLOCK) + [2] * BLOCK, "", "")
    assert len(one) == len(other) == 3
    assert one[:2] == other[:2] and one[2] != other[2]
    assert keys_of([1] * (BLOCK - 1), "", "") == ()
    assert len(keys_of([1] * BLOCK * (MAX_BLOCKS + 5), "", "")) == MAX_BLOCKS + 1


def test_contents_and_salts_separate_keys() -> None:
    keys = {keys_of([1] * BLOCK, content, salt) for content in ("", "a") for salt in ("", "b")}
    assert len(keys) == 4


def test_keys_are_kept_until_the_cache_is_full() -> None:
    prefixes = PrefixIndex(4 * BLOCK)
    first, second = keys_of([1] * (3 * BLOCK), "", ""), keys_of([2] * (3 * BLOCK), "", "")
    prefixes.add(first)
    assert (prefixes.num_shared(first), prefixes.num_shared(second)) == (3, 0)
    prefixes.add(second)
    assert (prefixes.num_shared(first), prefixes.num_shared(second)) == (1, 3)
    prefixes.add(keys_of([3] * (9 * BLOCK), "", ""))
    assert prefixes.num_shared(first) == 0


def test_a_shard_without_a_cache_has_nothing() -> None:
    prefixes = PrefixIndex(0)
    keys = keys_of([1] * BLOCK, "", "")
    prefixes.add(keys)
    assert prefixes.num_shared(keys) == 0

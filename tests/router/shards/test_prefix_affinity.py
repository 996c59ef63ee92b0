"""What the router believes of a shard's cache."""

from lorikeet.router.shards.prefix_affinity import BLOCK, MOST_BLOCKS, Prefixes, keys_of


def test_prompts_share_the_blocks_in_which_all_before_is_equal() -> None:
    one = keys_of([1] * (3 * BLOCK), "", "")
    other = keys_of([1] * (2 * BLOCK) + [2] * BLOCK, "", "")
    assert len(one) == len(other) == 3
    assert one[:2] == other[:2] and one[2] != other[2]
    assert keys_of([1] * (BLOCK - 1), "", "") == ()
    assert len(keys_of([1] * BLOCK * (MOST_BLOCKS + 5), "", "")) == MOST_BLOCKS + 1


def test_contents_and_salts_keep_them_apart() -> None:
    keys = {keys_of([1] * BLOCK, content, salt) for content in ("", "a") for salt in ("", "b")}
    assert len(keys) == 4


def test_what_was_sent_is_known_until_there_is_no_room() -> None:
    prefixes = Prefixes(4 * BLOCK)
    first, second = keys_of([1] * (3 * BLOCK), "", ""), keys_of([2] * (3 * BLOCK), "", "")
    prefixes.sent(first)
    assert (prefixes.num_shared(first), prefixes.num_shared(second)) == (3, 0)
    prefixes.sent(second)
    assert (prefixes.num_shared(first), prefixes.num_shared(second)) == (1, 3)
    prefixes.sent(keys_of([3] * (9 * BLOCK), "", ""))
    assert prefixes.num_shared(first) == 0


def test_a_shard_without_a_cache_has_nothing() -> None:
    prefixes = Prefixes(0)
    keys = keys_of([1] * BLOCK, "", "")
    prefixes.sent(keys)
    assert prefixes.num_shared(keys) == 0

"""What the router believes a shard can take never exceeds what the shard said, less what it had not seen."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.credit import CreditAccount


def test_nothing_is_known_before_the_shard_speaks() -> None:
    account = CreditAccount()
    assert not account.known
    assert not account.covers(0)


def test_what_is_on_its_way_counts() -> None:
    account = CreditAccount()
    account.update(3, 100, 0)
    account.sent(40)
    account.sent(40)
    assert account.num_requests == 1
    assert account.covers(20)
    assert not account.covers(21)
    account.update(2, 60, 1)  # the shard has seen the first one only
    assert (account.num_requests, account.num_kv_tokens) == (1, 20)
    account.update(1, 20, 2)
    assert (account.num_requests, account.num_kv_tokens) == (1, 20)
    assert account.num_unseen == 0


@given(st.lists(st.one_of(st.integers(1, 50), st.none()), max_size=60))
@settings(max_examples=300, deadline=None)
def test_words_that_cross_are_added_up(moves: list[int | None]) -> None:
    """Numbers: the router sends that many tokens. None: the shard takes one request and speaks."""
    account, sent, seen = CreditAccount(), [], []
    requests, tokens = 20, 600
    account.update(requests, tokens, 0)
    for move in moves:
        if move is not None and account.covers(move):
            account.sent(move)
            sent.append(move)
        elif move is None:
            if len(seen) < len(sent):
                seen.append(sent[len(seen)])
            account.update(requests - len(seen), tokens - sum(seen), len(seen))
        assert account.num_requests == requests - len(sent) >= 0
        assert account.num_kv_tokens == tokens - sum(sent) >= 0
        assert account.num_unseen == len(sent) - len(seen)

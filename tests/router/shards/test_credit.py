"""The router's account of a shard's credit never exceeds the report less the requests that it does not count."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lorikeet.router.shards.link import CreditAccount


def test_credit_is_unknown_before_the_first_report() -> None:
    account = CreditAccount()
    assert not account.known
    assert not account.covers(0)


def test_requests_in_flight_are_subtracted() -> None:
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
def test_reports_that_cross_requests_are_reconciled(moves: list[int | None]) -> None:
    """A number: the router sends so many tokens. None: the shard takes one request and reports."""
    account, sent, seen = CreditAccount(), list[int](), list[int]()
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


class CreditMachine(RuleBasedStateMachine):
    """A shard that takes and ends requests and sends reports, which reach the router later."""

    @initialize(num_requests=st.integers(0, 8), num_tokens=st.integers(0, 200))
    def begin(self, num_requests: int, num_tokens: int) -> None:
        self.account = CreditAccount()
        self.room = [num_requests, num_tokens]
        """What the shard has left, by its own count."""
        self.way: deque[int] = deque()
        """Prompts that it has not taken yet."""
        self.running: list[int] = []
        self.num_taken = 0
        self.reports: deque[tuple[int, int, int]] = deque()
        """Reports in flight."""
        self.last_report: tuple[int, int, int] | None = None
        self.sent: list[int] = []

    @rule(num_tokens=st.integers(0, 60))
    def send(self, num_tokens: int) -> None:
        if self.account.covers(num_tokens):
            self.account.sent(num_tokens)
            self.sent.append(num_tokens)
            self.way.append(num_tokens)

    @precondition(lambda self: self.way)
    @rule(most=st.integers(1, 5))
    def take(self, most: int) -> None:
        for _ in range(min(most, len(self.way))):
            num_tokens = self.way.popleft()
            self.room[0] -= 1
            self.room[1] -= num_tokens
            self.running.append(num_tokens)
            self.num_taken += 1
        assert self.room[0] >= 0 and self.room[1] >= 0, "more was sent than the shard has room for"

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 100))
    def end(self, choice: int) -> None:
        num_tokens = self.running.pop(choice % len(self.running))
        self.room[0] += 1
        self.room[1] += num_tokens

    @rule()
    def speak(self) -> None:
        num_requests, num_tokens = self.room
        self.reports.append((num_requests, num_tokens, self.num_taken))

    @precondition(lambda self: self.reports)
    @rule(most=st.integers(1, 3))
    def hear(self, most: int) -> None:
        for _ in range(min(most, len(self.reports))):
            self.last_report = self.reports.popleft()
            self.account.update(*self.last_report)

    @invariant()
    def it_is_the_last_word_less_what_was_sent_since(self) -> None:
        if not hasattr(self, "account"):
            return
        assert self.account.known == (self.last_report is not None)
        num_requests, num_tokens, num_seen = self.last_report or (0, 0, 0)
        unseen = self.sent[num_seen:]
        assert self.account.num_unseen == len(unseen)
        assert self.account.num_requests == num_requests - len(unseen) >= 0
        assert self.account.num_kv_tokens == num_tokens - sum(unseen) >= 0


def test_random_sequences_of_credit() -> None:
    run_state_machine_as_test(CreditMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))

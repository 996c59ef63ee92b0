"""Tokens of slow grammars are taken in without the interpreter's lock, with the same results, and their time counts."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLMatcher

from lorikeet.shard.grammar import unlocked
from lorikeet.shard.grammar.matcher import reason
from lorikeet.shard.grammar.threads import _NICENESS, Threads, set_helper
from lorikeet.shard.grammar.unlocked import UnlockedConsumer
from tests.shard.grammar.small_tokenizer import lark, tokenizer

AMBIGUOUS = lark('start: e\ne: e e | e "a" e | "a" | "b" | ""\n')
NUM_TOKENS = 60
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the time of other threads")


def ids(text: str) -> list[int]:
    return list(tokenizer().tokenize_str(text))


def matcher(grammar: str = AMBIGUOUS) -> LLMatcher:
    return LLMatcher(tokenizer(), grammar, log_level=0)


def unusable() -> LLMatcher:
    made = LLMatcher(tokenizer(), "start: (", log_level=0)
    assert made.get_error()
    return made


@pytest.fixture(params=["unlocked", "without the time of threads"])
def consumer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> UnlockedConsumer:
    if request.param != "unlocked":
        monkeypatch.setattr(unlocked, "MAX_ATTEMPTS", 0)
    return UnlockedConsumer(unusable)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_matcher_is_as_after_its_own_method(consumer: UnlockedConsumer) -> None:
    apart, plain = matcher(), matcher()
    for token_id in ids("ab" * 20 + "c" + "a"):
        assert consumer.consume(apart, token_id) == plain.consume_token(token_id)
        assert reason(apart) == reason(plain)
        if not plain.get_error():
            assert apart.compute_bitmask() == plain.compute_bitmask()
    assert plain.get_error(), "after a token that the grammar refuses"


@needs_linux
def test_the_time_of_the_thread_that_works_is_counted(thread: ThreadPoolExecutor) -> None:
    consumer = UnlockedConsumer(unusable)

    def both() -> tuple[float, float, float]:
        apart = matcher()
        consumer.processor_time()  # the thread that works has begun
        whole, own = consumer.processor_time(), time.thread_time()
        for token_id in ids("ab" * NUM_TOKENS):
            consumer.consume(apart, token_id)
        whole, own = consumer.processor_time() - whole, time.thread_time() - own
        plain, began = matcher(), time.thread_time()
        for token_id in ids("ab" * NUM_TOKENS):
            plain.consume_token(token_id)
        return whole, own, time.thread_time() - began

    whole, own, plain = thread.submit(both).result()
    assert own < plain / 2 < whole


@needs_linux
@pytest.mark.parametrize("is_unlocked", [True, False])
def test_other_threads_run_meanwhile(thread: ThreadPoolExecutor, is_unlocked: bool) -> None:
    """Where no thread has to give up the lock, one sees another inside of a call only if the call does."""
    consumer, apart, states, state = UnlockedConsumer(unusable), matcher(), set[int](), [0]
    thread.submit(consumer.processor_time).result()

    def consume() -> None:
        take = consumer.consume if is_unlocked else LLMatcher.consume_token
        for token_id in ids("ab" * NUM_TOKENS):
            state[0] = 1
            take(apart, token_id)
            state[0] = 0
        state[0] = 2

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread.submit(consume)
        while state[0] != 2:
            states.add(state[0])
            time.sleep(0.0001)
    finally:
        sys.setswitchinterval(interval)
    assert (1 in states) is is_unlocked


@needs_linux
def test_the_thread_that_works_steps_back_too() -> None:
    threads, consumer, found = Threads(1, fast_s=0.02), UnlockedConsumer(unusable), list[int]()

    def work() -> int:
        consumer.processor_time()
        worker = consumer._worker()
        assert worker is not None
        end = time.monotonic() + 10
        while os.getpriority(os.PRIO_PROCESS, worker.thread_id) != _NICENESS and time.monotonic() < end:
            time.sleep(0.01)
        found.append(worker.thread_id)
        return os.getpriority(os.PRIO_PROCESS, worker.thread_id)

    assert threads.submit(work, -1).result(20) == _NICENESS
    assert threads.submit(work, -1).result(20) == _NICENESS
    assert found[0] != found[1], "a thread that stepped back ends with its work"


@needs_linux
def test_one_that_starts_once_its_caller_has_stepped_back_does_so_at_once() -> None:
    """On a busy machine it takes long to start."""

    def work() -> int:
        end = time.monotonic() + 10
        while os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) != _NICENESS and time.monotonic() < end:
            time.sleep(0.01)
        with subprocess.Popen(["sleep", "10"]) as helper:  # which has another priority
            os.setpriority(os.PRIO_PROCESS, helper.pid, 1 if os.getpriority(os.PRIO_PROCESS, 0) >= 0 else 0)
            set_helper(helper.pid)
            found = os.getpriority(os.PRIO_PROCESS, helper.pid)
            helper.kill()
        return found

    assert Threads(1, fast_s=0.02).submit(work, -1).result(20) == _NICENESS

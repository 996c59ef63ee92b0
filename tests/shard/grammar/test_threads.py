"""Jobs that take long: they step back, leave their thread to others, and fail when their time is up."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from llguidance import LLTokenizer

from lorikeet.proto.params import Grammar
from lorikeet.shard.grammar.compiler import MATCHING_NICENESS, GrammarCompiler
from lorikeet.shard.grammar.threads import FAST_S, MAX_SLOW, Threads
from tests.shard.grammar import small_tokenizer

SOON = 30.0
"""Seconds within which something must happen."""


@contextmanager
def blocking(threads: Threads, number: int) -> Iterator[list[int]]:
    """So many jobs run until the end of the block. Gives their thread ids, once all have stepped back."""
    ended, ids = threading.Event(), list[int]()

    def work() -> str:
        ids.append(threading.get_native_id())
        ended.wait(SOON)
        return "late"

    jobs = [threads.submit(work, "too slow") for _ in range(number)]
    pause = threading.Event()
    while threads.num_slow < number:
        pause.wait(0.005)
    try:
        yield ids
    finally:
        ended.set()
        assert all(job.result(SOON) for job in jobs)


def test_a_slow_job_leaves_its_thread_to_others() -> None:
    threads = Threads(1, fast_s=0.01)
    with blocking(threads, 1) as ids:
        if sys.platform == "linux":
            assert os.getpriority(os.PRIO_PROCESS, ids[0]) == 14 > os.getpriority(os.PRIO_PROCESS, 0)
        others = {threads.submit(threading.get_native_id, 0).result(SOON) for _ in range(3)}
        assert not others & set(ids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_tokens_of_slow_grammars_come_after_steps() -> None:
    compiler = small_tokenizer.compiler()
    niceness = partial(os.getpriority, os.PRIO_PROCESS, 0)
    assert compiler._submit("", niceness).result(SOON) == niceness() + MATCHING_NICENESS
    assert compiler._threads.submit(niceness, None).result(SOON) == niceness()


def test_no_more_than_some_threads_are_replaced() -> None:
    threads = Threads(1, fast_s=0.01)
    ended = threading.Event()
    with blocking(threads, MAX_SLOW):
        threads.submit(lambda: ended.wait(SOON), False)
        waiting = threads.submit(lambda: 5, 0)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        ended.set()
        assert waiting.result(SOON) == 5


def test_a_job_fails_when_its_time_is_up() -> None:
    threads = Threads(1, fast_s=0.01, limit_s=0.05)
    ended = threading.Event()
    job = threads.submit(lambda: ended.wait(SOON), "too slow")
    assert job.result(SOON) == "too slow"
    ended.set()
    assert threads.submit(lambda: 5, 0).result(SOON) == 5
    assert job.result() == "too slow"


def test_a_failure_is_that_of_the_job() -> None:
    with pytest.raises(ZeroDivisionError):
        Threads(1).submit(lambda: 1 // 0, None).result(SOON)


def test_a_grammar_that_took_too_long_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have been busy. Meanwhile other grammars are compiled."""
    compiler, ended, build = small_tokenizer.compiler(), threading.Event(), GrammarCompiler._build
    monkeypatch.setattr(compiler, "_threads", Threads(1, fast_s=0.01, limit_s=0.05))
    monkeypatch.setattr(compiler, "_build", lambda text: ended.wait(SOON) and build(compiler, text))
    slow = Grammar(small_tokenizer.choice("true"))
    first = compiler.match(slow)
    assert first.start() and "takes longer than" in first.error
    ended.set()
    second = compiler.match(slow)
    assert second.start() and not second.error


def test_the_tokenizer_is_read_with_the_first_grammar() -> None:
    """It takes memory, and a compilation that waits for it keeps its thread's priority."""
    reads, may_read, num_compiled = list[str](), threading.Event(), threading.Semaphore(0)

    def read() -> LLTokenizer:
        reads.append(threading.current_thread().name)
        may_read.wait(30)
        return small_tokenizer.tokenizer()

    compiler = GrammarCompiler(read, num_compiled.release)
    assert not reads
    matching = [compiler.match(Grammar(small_tokenizer.regex(text))) for text in ("a", "b")]
    time.sleep(3 * FAST_S)
    assert compiler._threads.num_slow == 0
    may_read.set()
    assert all(num_compiled.acquire(timeout=30) for _ in matching)
    assert all(each.start() for each in matching)
    assert reads == ["grammar-tokenizer"]

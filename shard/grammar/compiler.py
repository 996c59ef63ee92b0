"""Compiles grammars in threads, outside the step loop, and keeps the newest ones compiled."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from lorikeet.proto.grammars import GRAMMAR_LIMITS
from lorikeet.proto.params import Grammar
from lorikeet.shard.grammar.matcher import BackgroundMatching, Compiled, GrammarMatcher, raise_unless_library, reason
from lorikeet.shard.grammar.threads import LIMIT_S, Threads
from lorikeet.shard.grammar.unlocked import UnlockedConsumer

MAX_COMPILED = 128
MAX_COMPILED_BYTES = 4 << 20
"""Most compiled grammars that are kept, and most bytes of their texts; least recently used first to go."""
NUM_THREADS = 2
"""For compilations, and as many for tokens of slow grammars."""
MATCHING_NICENESS = 5
"""Of the latter: a third of the processor time of the step loop, where both want a core."""
NOT_IN_TIME = Compiled(None, error=f"the grammar cannot be compiled: it takes longer than {LIMIT_S:g} s")


class GrammarCompiler:
    """Grammar compiler of one shard. `make_tokenizer` runs with the first grammar, in a thread: that takes a third of a
    second and 40 MiB for a vocabulary of 49 152.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], wake: Callable[[], None]) -> None:
        """`wake` is called from a thread whenever a compilation has ended."""
        self._threads = Threads(NUM_THREADS)
        self._matching = Threads(NUM_THREADS, niceness=MATCHING_NICENESS)
        self._consumer = UnlockedConsumer(self._unusable)
        self._tokenizer: Future[LLTokenizer] = Future()
        self._make_tokenizer: Callable[[], LLTokenizer] | None = make_tokenizer
        """None from the first grammar on."""
        self._wake = wake
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, tuple[Future[Compiled], int]] = OrderedDict()
        self._num_bytes = 0

    def match(
        self, grammar: Grammar, output_ids: Sequence[int] = (), is_private: bool = False, caller: str = ""
    ) -> GrammarMatcher:
        """The constraint of a caller's request that has some output. Never waits. Requests of one grammar share its
        lexer, whose number of states is limited; a private one has its own.
        """
        self._read_tokenizer()
        compiling = (self._compile_apart if is_private else self._compile)(grammar.text, caller)
        background = BackgroundMatching(partial(self._submit, caller), self._consumer)
        return GrammarMatcher(compiling, grammar.proposes, output_ids, background, is_private)

    def _unusable(self) -> LLMatcher:
        """One that takes in nothing."""
        return LLMatcher(self._tokenizer.result(), "start: (", log_level=0)

    def _compile_apart(self, grammar: str, caller: str) -> Future[Compiled]:
        """Also lets the next request compile it anew, because the shared lexer may be full."""
        with self._lock:
            if (key := _key(grammar)) in self._compiled:
                self._forget(key)
        compiling = self._build_later(grammar, caller)
        compiling.add_done_callback(lambda _: self._wake())
        return compiling

    def _submit(self, caller: str, work: Callable[[], bool]) -> Future[bool]:
        """Run work of one request in a thread. False where it takes too long."""
        running = self._matching.submit(work, False, caller)
        running.add_done_callback(lambda _: self._wake())
        return running

    def _compile(self, grammar: str, caller: str) -> Future[Compiled]:
        key = _key(grammar)
        with self._lock:
            compiled = self._compiled.pop(key, None)
            if compiled is None:
                compiled = self._build_later(grammar, caller), len(grammar)
                self._num_bytes += len(grammar)
            self._compiled[key] = compiled
            while len(self._compiled) > MAX_COMPILED or self._num_bytes > MAX_COMPILED_BYTES:
                self._forget(next(iter(self._compiled)))
        # outside the lock, because it may be called now
        compiled[0].add_done_callback(partial(self._compiled_one, key))
        return compiled[0]

    def _compiled_one(self, key: bytes, done: Future[Compiled]) -> None:
        """One that took too long is compiled again when it is asked for again: the machine may have been busy."""
        if done.result() is NOT_IN_TIME:
            with self._lock:
                if key in self._compiled and self._compiled[key][0] is done:
                    self._forget(key)
        self._wake()

    def _forget(self, key: bytes) -> None:
        _, num_bytes = self._compiled.pop(key)
        self._num_bytes -= num_bytes

    def _build_later(self, grammar: str, caller: str) -> Future[Compiled]:
        """Once the tokenizer is read: a job that waits for it would lose its priority."""
        compiled: Future[Compiled] = Future()

        def pass_on(job: Future[Compiled]) -> None:
            failure = job.exception()
            compiled.set_result(job.result()) if failure is None else compiled.set_exception(failure)

        def build(_: Future[LLTokenizer]) -> None:
            job: Future[Compiled] = self._threads.submit(partial(self._build, grammar), NOT_IN_TIME, caller)
            job.add_done_callback(pass_on)

        self._tokenizer.add_done_callback(build)
        return compiled

    def _build(self, grammar: str) -> Compiled:
        """The compiled grammar with its first mask, which is the most expensive one of many grammars."""
        try:
            tokenizer = self._tokenizer.result()
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=GRAMMAR_LIMITS)
            if not matcher.get_error():
                matcher.compute_bitmask()
        except BaseException as failure:
            raise_unless_library(failure)
            return Compiled(None, error=f"the grammar cannot be compiled: {type(failure).__name__}")
        if error := reason(matcher):
            return Compiled(None, error=f"the grammar cannot be compiled: {error}")
        return Compiled(matcher, tokenizer.eos_token, style=self._style(grammar, tokenizer))

    @staticmethod
    def _style(grammar: str, tokenizer: LLTokenizer) -> LLMatcher | None:
        """A JSON grammar with white space as `json.dumps` writes it: where it forces tokens, they are likely."""
        try:
            parsed = json.loads(grammar)
            (schema,) = [single["json_schema"] for single in parsed["grammars"]]
            if "whitespace_pattern" not in (options := schema["x-guidance"]):
                return None
        except (ValueError, KeyError, TypeError):  # no JSON schema
            return None
        del options["whitespace_pattern"]
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        matcher = LLMatcher(tokenizer, json.dumps(parsed), log_level=0, limits=GRAMMAR_LIMITS)
        return None if matcher.get_error() else matcher

    def _read_tokenizer(self) -> None:
        """Begin, if it has not begun. Like `match`, called by one thread."""
        if (make := self._make_tokenizer) is not None:
            self._make_tokenizer = None
            threading.Thread(target=self._read, args=(make,), name="grammar-tokenizer", daemon=True).start()

    def _read(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        try:
            self._tokenizer.set_result(make_tokenizer())
        except BaseException as failure:
            self._tokenizer.set_exception(failure)


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()

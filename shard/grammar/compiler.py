"""Compiles grammars in threads, outside the step loop, and keeps the newest ones compiled."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from lorikeet.proto.grammars import GRAMMAR_LIMITS
from lorikeet.shard.grammar.matcher import Compiled, GrammarMatcher, raise_unless_library, reason
from lorikeet.shard.scheduler.constraint import Grammar, NoGrammars

MAX_COMPILED = 256
MAX_COMPILED_BYTES = 4 << 20
"""Most compiled grammars that are kept, and most bytes of their texts; least recently used first to go."""
NUM_THREADS = 2


class GrammarCompiler(NoGrammars):
    """Of one shard. `make_tokenizer` is called once, in a thread, because reading a tokenizer takes about a second."""

    reject_reason = ""

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], wake: Callable[[], None]) -> None:
        """`wake` is called from a thread whenever a compilation has ended."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._tokenizer = self._threads.submit(make_tokenizer)
        self._wake = wake
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, tuple[Future[Compiled], int]] = OrderedDict()
        self._num_bytes = 0

    def match(self, grammar: Grammar) -> GrammarMatcher:
        return GrammarMatcher(self._compile(grammar.text), grammar.proposes)

    def _compile(self, grammar: str) -> Future[Compiled]:
        key = hashlib.sha256(grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            found = self._compiled.pop(key, None)
            if found is None:
                found = self._threads.submit(self._build, grammar), len(grammar)
                found[0].add_done_callback(lambda _: self._wake())
                self._num_bytes += len(grammar)
            self._compiled[key] = found
            while len(self._compiled) > MAX_COMPILED or self._num_bytes > MAX_COMPILED_BYTES:
                _, (_, num_bytes) = self._compiled.popitem(last=False)
                self._num_bytes -= num_bytes
        return found[0]

    def _build(self, grammar: str) -> Compiled:
        try:
            tokenizer = self._tokenizer.result()
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=GRAMMAR_LIMITS)
        except BaseException as failure:
            raise_unless_library(failure)
            return Compiled(None, error=f"the grammar cannot be compiled: {type(failure).__name__}")
        if error := reason(matcher):
            return Compiled(None, error=f"the grammar cannot be compiled: {error}")
        return Compiled(matcher, tokenizer.eos_token)


def read_tokenizer(path: str | Path, vocab_size: int) -> LLTokenizer:
    """The tokenizer of the model in the folder `path`, padded to the rows of the output head. Takes about a second.

    Raises OSError or ValueError for a model without a fast tokenizer.
    """
    folder = Path(path)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=_eos_id(folder))


def _eos_id(folder: Path) -> int | None:
    """The first end-of-sequence token that the model's configurations name."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ids = found if isinstance(found, list) else [found]
            if ids and isinstance(ids[0], int):
                return ids[0]
    return None

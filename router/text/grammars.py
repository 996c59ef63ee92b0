"""Serializes grammars for shards, after llguidance has accepted them. Runs in threads, in which callers take turns,
because some take a second.

Options go through `overrides`, so that a schema's own `x-guidance` cannot weaken them.
"""

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from typing import Any

import llguidance
from llguidance import LLMatcher

from lorikeet.proto.grammars import GRAMMAR_LIMITS
from lorikeet.router.errors import Overloaded, ValidationError
from lorikeet.router.text.pool import TextPool

OVERRIDES: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"[\x20\x0A]{1,2}"}
CHECK_TIMEOUT_S = 5.0
MAX_CHECKED_BYTES = 16 << 20
"""Of serialized grammars that are kept, least recently used first to go."""


class Grammars:
    """Of one router. Keeps the newest results."""

    def __init__(self, num_threads: int = 1) -> None:
        self._pool = TextPool(num_threads)
        self._checked: OrderedDict[bytes, str] = OrderedDict()
        self._num_bytes = 0

    async def serialize(self, kind: str, value: Any, field: str, caller: str) -> str:
        """The grammar as shards take it. Raises ValidationError for one that llguidance refuses, with its reason, and
        Overloaded where the grammars of other callers leave it no thread.
        """
        source = json.dumps([kind, value])
        key = hashlib.sha256(source.encode()).digest()
        if key in self._checked:
            self._checked.move_to_end(key)
            return self._checked[key]
        grammar = await self._check(kind, value, field, caller, len(source))
        if key not in self._checked:
            self._checked[key] = grammar
            self._num_bytes += len(grammar)
        while self._num_bytes > MAX_CHECKED_BYTES:
            self._num_bytes -= len(self._checked.popitem(last=False)[1])
        return grammar

    async def _check(self, kind: str, value: Any, field: str, caller: str, num_chars: int) -> str:
        has_started = threading.Event()

        def work() -> str:
            has_started.set()
            return _serialize(kind, value, field)

        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await self._pool.run(work, caller, num_chars)
        except TimeoutError:
            if not has_started.is_set():
                raise Overloaded from None
            sentence = f"`{field}` is too complex: checking it takes longer than {CHECK_TIMEOUT_S:g} s"
            raise ValidationError(sentence, field) from None


def _serialize(kind: str, value: Any, field: str) -> str:
    try:
        grammar = _MAKERS[kind](value)
        problem = LLMatcher.validate_grammar(grammar, limits=GRAMMAR_LIMITS)
    except BaseException as error:  # bad input is a ValueError; the library's panics are no subclass of Exception
        raise ValidationError(f"`{field}` is not supported: {_first_line(str(error))}", field) from None
    if problem:
        raise ValidationError(f"`{field}` is not supported: {_first_line(problem)}", field)
    return grammar


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["unknown error"])[0][:500]


_MAKERS = {
    "json_schema": lambda value: LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=OVERRIDES),
    "regex": LLMatcher.grammar_from_regex,
    "choice": lambda value: llguidance.grammar_from("choice", json.dumps(value)),
    "grammar": lambda value: llguidance.grammar_from("grammar", value),
}

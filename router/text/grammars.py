"""Serializes grammars for shards, after llguidance has accepted them. Runs in a thread: some take a second.

Options go through `overrides`, so that a schema's own `x-guidance` cannot weaken them.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
from llguidance import LLMatcher

from lorikeet.proto.grammars import GRAMMAR_LIMITS
from lorikeet.router.errors import ValidationError

OVERRIDES: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"[\x20\x0A]{1,2}"}
CHECK_TIMEOUT_S = 5.0
MAX_CHECKED = 1024


class Grammars:
    """Of one router. Keeps the newest results."""

    def __init__(self, num_threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._checked: OrderedDict[bytes, str] = OrderedDict()

    async def serialize(self, kind: str, value: Any, field: str) -> str:
        """The grammar as shards take it. Raises ValidationError for one that llguidance refuses, with its reason."""
        key = hashlib.sha256(json.dumps([kind, value]).encode()).digest()
        if key not in self._checked:
            work = asyncio.get_running_loop().run_in_executor(self._threads, _serialize, kind, value, field)
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    self._checked[key] = await work
            except TimeoutError:
                sentence = f"`{field}` is too complex: checking it takes longer than {CHECK_TIMEOUT_S:g} s"
                raise ValidationError(sentence, field) from None
            while len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
        self._checked.move_to_end(key)
        return self._checked[key]


def _serialize(kind: str, value: Any, field: str) -> str:
    try:
        grammar = _MAKERS[kind](value)
        problem = LLMatcher.validate_grammar(grammar, limits=GRAMMAR_LIMITS)
    except Exception as error:  # the library reports bad input as ValueError, and panics on some
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

"""Prompts for general heads: functions of the corpus, cut after some line."""

import random
from collections.abc import Sequence

from lorikeet.demo.data import corpus
from lorikeet.demo.data.corpus import SourceFile

MAX_CHARS = 700
MIN_LINES = 4
"""Minimum lines of a whole function; shorter ones leave nothing to continue."""


def pieces(files: Sequence[SourceFile], count: int, seed: int) -> list[str]:
    """The first lines of `count` different functions."""
    choice = random.Random(f"pieces {seed}")
    beginnings: dict[str, None] = {}
    for file in choice.sample(list(files), len(files)):
        for function in corpus.functions(file):
            lines = function.source.split("\n")[:-1]
            if len(lines) < MIN_LINES:
                continue
            text = "\n".join(lines[: choice.randrange(1, len(lines) - 1)]) + "\n"
            if len(text) <= MAX_CHARS:
                beginnings[text] = None
    if len(beginnings) < count:
        raise ValueError(f"the corpus has {len(beginnings)} beginnings of functions, {count} are wanted")
    return choice.sample(list(beginnings), count)

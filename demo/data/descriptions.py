"""Descriptions of functions and their code, from the corpus: what the adapter `search` learns to bring together.

A description is the first sentence of a docstring, and the code is the function without its docstring.
"""

import ast
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from lorikeet.demo.data.corpus import CorpusFunction, SourceFile, functions

WORDS = (3, 40)
"""Fewest and most of a description."""


@dataclass(frozen=True)
class Described:
    """A function and what it is said to do."""

    description: str
    code: str


def described(files: Iterable[SourceFile]) -> list[Described]:
    """Every function that has a description, in the order of the files, each description once."""
    result: dict[str, Described] = {}
    for file in files:
        for function in functions(file):
            if (description := description_of(function)) is not None:
                result.setdefault(description, Described(description, code_of(function)))
    return list(result.values())


def codes(files: Iterable[SourceFile]) -> list[str]:
    """The code of every function, each once."""
    return list(dict.fromkeys(code_of(function) for file in files for function in functions(file)))


def description_of(function: CorpusFunction) -> str | None:
    """None for a function without one, or with one that is too short or too long."""
    if function.docstring is None:
        return None
    paragraph = " ".join(function.docstring.strip().partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    low, high = WORDS
    return sentence if low <= len(sentence.split()) <= high else None


def code_of(function: CorpusFunction) -> str:
    """The source without its docstring."""
    if function.docstring is None:
        return function.source
    node = ast.parse(function.source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    docstring = node.body[0]
    lines = function.source.split("\n")
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return textwrap.dedent("\n".join(lines))

"""The corpus: the source of Python's standard library, as installed with the running interpreter.

Selects the files, splits them into training and held-out modules, and extracts their functions. Nothing is downloaded.
"""

import ast
import hashlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HELD_OUT_PERCENT = 4
"""Percentage of modules held out, not of bytes: it depends on a module's path only, not on other installed modules."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data", "__phello__"})
"""Not the standard library, or generated tables (code pages, help topics) that teach a model no Python."""

MIN_CORPUS_BYTES = 12_000_000


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus."""

    path: str
    """Relative to the standard library's folder, with forward slashes."""
    text: str

    @property
    def held_out(self) -> bool:
        return is_held_out(self.path)


@dataclass(frozen=True)
class CorpusFunction:
    """One function, extracted from its file and dedented."""

    path: str
    name: str
    source: str
    """Dedented, from `def` (or its decorators) to its last line, ending in one newline; it compiles by itself."""
    docstring: str | None
    body_line: int
    """Index into `source.split("\n")` of the first line of the body after any docstring."""


def is_held_out(path: str) -> bool:
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@cache
def _texts(root: Path) -> tuple[SourceFile, ...]:
    """Every UTF-8 file in order of path, without duplicates, which could be on both sides of the split."""
    files = []
    seen = set()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0].startswith("config-"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # test data for codecs
            continue
        if text.strip() not in seen:
            seen.add(text.strip())
            files.append(SourceFile(relative.as_posix(), text))
    return tuple(files)


def training_files(root: Path | None = None) -> list[SourceFile]:
    return [file for file in _texts(root or standard_library()) if not file.held_out and _parses(file.text)]


def held_out_files(root: Path | None = None) -> list[SourceFile]:
    return [file for file in _texts(root or standard_library()) if file.held_out and _parses(file.text)]


def functions(file: SourceFile) -> Iterator[CorpusFunction]:
    """The functions and methods of a file that compile by themselves (one with a stray `nonlocal` does not)."""
    lines = file.text.split("\n")  # not splitlines(), which also breaks at form feeds, where Python's parser does not
    for node in ast.walk(_parse(file.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        source = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip() + "\n"
        docstring = ast.get_docstring(node)
        body = node.body[1:] if docstring is not None else node.body
        if body and body[0].lineno > node.lineno and compiles(source):
            yield CorpusFunction(file.path, node.name, source, docstring, body[0].lineno - first)


def compiles(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "<corpus>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _parses(text: str) -> bool:
    """False for test data with deliberate errors, or for another version of Python."""
    try:
        _parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True

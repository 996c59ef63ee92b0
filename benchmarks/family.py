"""Proofs about the embedded family, whose own commands measure it: base, adapters, draft model, heads and their tool.

Knows which command prints what, and which of its numbers a bar is about.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.whole import printed
from lorikeet.demo.training.lora import RECIPES

WEIGHTLESS = {".py", ".md"}
ADAPTERS = tuple(RECIPES)
COPIED = "citation"
"""The adapter whose answers are copied from the context."""
SHORT = "value"
"""The adapter whose answers are values, and may be short."""


def base(finished: frozenset[str] = frozenset()) -> Cases:
    """The embedded model on the modules that it never saw."""
    if "held out" not in finished:
        yield Case("held out", _told("base"))


def bits_over_xz(raw: Raw) -> float:
    return float(raw["model_bits_per_byte"] / raw["xz_bits_per_byte"])


def compiled_share(raw: Raw) -> float:
    return float(raw["compiled"] / raw["continuations"])


def adapter(name: str, finished: frozenset[str] = frozenset()) -> Cases:
    """One adapter on held-out examples of its task, and the bare base on the same."""
    if "held out" not in finished:
        yield Case("held out", _told("adapters", "--only", name)[0])


def examples(raw: Raw) -> float:
    return float(raw["examples"])


def exact(raw: Raw) -> float:
    return float(raw["exact"])


def base_exact(raw: Raw) -> float:
    return float(raw["base_exact"])


def mean_answer(raw: Raw) -> float:
    """In tokens."""
    return float(raw["mean_answer_tokens"])


def least_copied(raw: Raw) -> float:
    """In tokens, of the shortest answer."""
    return float(raw["min_answer_tokens"])


def draft(finished: frozenset[str] = frozenset()) -> Cases:
    """The draft model against the base on held-out modules."""
    if "held out" not in finished:
        yield Case("held out", _told("draft"))


def overlap(raw: Raw) -> float:
    return float(raw["overlap"])


def draft_share(raw: Raw) -> float:
    return float(raw["draft_parameters"] / raw["base_parameters"])


def heads(finished: frozenset[str] = frozenset()) -> Cases:
    """All committed heads, by the tokens per step of a chain of their best guesses."""
    if "held out" not in finished:
        yield Case("held out", {f"{row['heads']} on {row['text']}": row for row in _told("heads")})


def of_base(raw: Raw) -> float:
    return float(raw["base on base"]["tokens_per_step"])


def of_citation(raw: Raw) -> float:
    return float(raw["citation on citation"]["tokens_per_step"])


def of_citation_joined(raw: Raw) -> float:
    return float(raw["citation-joined on citation"]["tokens_per_step"])


def tool(finished: frozenset[str] = frozenset()) -> Cases:
    """Heads of a finished adapter, trained with the tool alone and timed."""
    if "citation" not in finished:
        yield Case("citation", _told("tool"))


def tool_share(raw: Raw) -> float:
    return float(raw["by_tool"]["tokens_per_step"] / raw["committed"]["tokens_per_step"])


def tool_minutes(raw: Raw) -> float:
    return float(raw["seconds"] / 60)


def size(finished: frozenset[str] = frozenset()) -> Cases:
    """All that is committed of the family, but for its source."""
    if "files" not in finished:
        files = [path for path in Path(servers.REPOSITORY, "demo").rglob("*") if path.is_file()]
        counted = {path for path in files if path.suffix not in WEIGHTLESS and "__pycache__" not in path.parts}
        yield Case("files", {"bytes": sum(path.stat().st_size for path in counted)})


def megabytes(raw: Raw) -> float:
    return float(raw["bytes"] / 1e6)


def _told(what: str, *more: str) -> Any:
    """The last line of `lorikeet.demo.evaluation`, which is JSON."""
    return json.loads(printed([sys.executable, "-m", "lorikeet.demo.evaluation", what, *more])[-1])

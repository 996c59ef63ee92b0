"""Which of two kernels computes a segment's attention on CUDA: a table by query length and context length.

The file kernel_limits.json has limits for each kind of device, and a default. `make gpu-check ARGS="--only limits"`
measures both kernels and replaces the limits of the card at hand. The lookup takes a segment's own two lengths, never
the batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).with_name("kernel_limits.json")
DEFAULT = "default"
LEAST_QUERY = 512
"""Every limit is at least this number of query tokens. Captured steps have no more, so that they launch the paged
kernel alone, as do decoding and verification. FlashAttention 3 chooses its tiles by the longest query of a step, but
the same for all that are longer than this.
"""


class Limit(NamedTuple):
    """For segments with up to `max_context` tokens of context."""

    max_context: int | None
    """The query's tokens and all before them; None for any number."""
    max_query: int
    """Most query tokens that the paged kernel computes; FlashAttention computes longer segments."""


@dataclass(frozen=True)
class KernelLimits:
    """The limits of one device, by ascending context; the last one is for any context."""

    limits: tuple[Limit, ...]

    @property
    def most_captured(self) -> int:
        """Rows of the largest step that cannot have a segment for FlashAttention."""
        return min(limit.max_query for limit in self.limits)

    def is_paged(self, queries: npt.NDArray[np.int32], contexts: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """queries, contexts: [R] tokens of each segment. Returns [R] whether the paged kernel computes it."""
        ends = [limit.max_context for limit in self.limits if limit.max_context is not None]
        most = np.array([limit.max_query for limit in self.limits])
        return np.asarray(queries <= most[np.searchsorted(ends, contexts)])


BUILT_IN = KernelLimits((Limit(None, LEAST_QUERY),))


def key_of(capability: tuple[int, int], implementation: str) -> str:
    """`9.0 FA3` for compute capability 9.0 and FlashAttention 3."""
    return f"{capability[0]}.{capability[1]} {implementation}"


def read_limits(capability: tuple[int, int], implementation: str, path: Path = FILE) -> KernelLimits:
    """The table of a device, the default where it has none. Raises ValueError naming what is wrong with the file."""
    tables = parse(path.read_text(), path.name)
    return tables.get(key_of(capability, implementation), tables[DEFAULT])


def write_limits(key: str, limits: Sequence[Limit], path: Path = FILE) -> None:
    """Replace the limits of one kind of device. Raises ValueError for limits that `parse` would reject."""
    tables = {**parse(path.read_text(), path.name), key: KernelLimits(tuple(limits))}
    text = written(tables)
    parse(text, path.name)
    path.write_text(text)


def written(tables: Mapping[str, KernelLimits]) -> str:
    """The text of a file, as `parse` reads it: one line for each kind of device."""
    lines = [f'  "{key}": {json.dumps([limit._asdict() for limit in tables[key].limits])}' for key in sorted(tables)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse(text: str, name: str) -> dict[str, KernelLimits]:
    """The tables of a file. Raises ValueError naming the invalid part of file `name`."""
    try:
        content = json.loads(text)
    except ValueError as failure:
        raise ValueError(f"{name} is not JSON: {failure}") from None
    if not isinstance(content, dict) or DEFAULT not in content:
        raise ValueError(f"{name} must hold tables by device, one of them {DEFAULT!r}")
    return {key: KernelLimits(tuple(_limits(entries, f"{name}: {key}"))) for key, entries in content.items()}


def _limits(entries: object, what: str) -> list[Limit]:
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{what} is not a list of limits")
    limits: list[Limit] = []
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != set(Limit._fields):
            raise ValueError(f"{what}: a limit has exactly the keys {' and '.join(Limit._fields)}")
        limit = Limit(**entry)
        if not _is_count(limit.max_query) or limit.max_query < LEAST_QUERY:
            raise ValueError(f"{what}: max_query is {limit.max_query!r}, not a number of at least {LEAST_QUERY} tokens")
        limits.append(limit)
    *ends, last = [limit.max_context for limit in limits]
    if last is not None:
        raise ValueError(f"{what}: the max_context of the last limit must be null")
    numbers = [0 if end is None or not _is_count(end) else end for end in ends]
    if any(later <= before for before, later in zip([0, *numbers], numbers, strict=False)):
        raise ValueError(f"{what}: max_context must be ascending numbers of tokens before the last limit")
    return limits


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

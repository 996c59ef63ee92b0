"""The shape of a source, which files of a listing make an adapter, and how large they may be. Imports no torch.

The router calls `resolve` and `small_files` for a caller, with the caller's token; the loader's process calls `fetch`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lorikeet.adapters.errors import AdapterInvalid, AdapterTooLarge
from lorikeet.adapters.pin import Pin
from lorikeet.adapters.refs import Ref

CONFIG = "adapter_config.json"
SMALL_NAMES = frozenset(
    {CONFIG, "config.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json", "tokenizer.json"}
)
"""Files that are read beside the weights, where they are there."""
MAX_SMALL_BYTES = 32 << 20
"""Of one small file: the largest tokenizers have about 20 MiB."""
MAX_CONFIG_BYTES = 1 << 20
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""By preference."""
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Of Medusa heads, by preference."""
HEADS_CONFIG = "config.json"
PEEK_BYTES = 64 << 10
"""By so much of a file's beginning it is told whether it holds heads."""
_MOST_UNNAMED = 8
_HEADS_KEY = re.compile(rb'"\d{1,4}\.\d{1,4}\.(linear\.)?weight" *:')

Within = Callable[[float], None]
"""Called with the seconds that what follows may take."""

Peek = Callable[[str], bytes]
"""The first PEEK_BYTES of a file, by name."""


@dataclass(frozen=True)
class FileHead:
    """The beginning of one file."""

    content: bytes
    size: int
    """Of the whole file."""


@dataclass(frozen=True)
class Resolved:
    """What a source says of a name, for one caller."""

    pin: Pin
    is_public: bool
    """Whether anyone may use it, without any token."""


def unbounded(seconds: float) -> None:
    """For callers that wait as long as it takes."""


class AdapterSource(Protocol):
    """One kind of place. Every method raises leaves of AdapterError and nothing else."""

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """Settle a name on a version. That it succeeds is the caller's right to use it."""

    async def small_files(self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES) -> dict[str, bytes]:
        """Those of `names` that are there, each of bounded size."""

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        """Bring the files to this machine; the path of a folder with CONFIG and one of WEIGHTS (or an index and parts),
        with heads, or with both.

        `folder` belongs to this pin alone; it may hold what an earlier attempt left, to be resumed. A source whose
        files lie here already answers with their own folder. Sizes are checked against the limit before a byte of
        weights moves. Blocks: called in a thread. Where the source may keep it waiting, it says to `within` how long
        each part may take.
        """

    def heads(self, pin: Pin, token: str | None, num_bytes: int) -> dict[str, FileHead]:
        """The first bytes of each weight file, so many at most. Blocks: called in a thread."""

    async def close(self) -> None:
        """Let connections go."""


def parts(chosen: Iterable[str]) -> list[str]:
    """Those of the files that `choose` chose that hold weights."""
    return [name for name in chosen if name not in SMALL_NAMES and not name.endswith(".index.json")]


def find_heads(names: Collection[str], peek: Peek) -> str | None:
    """Which of a folder's files holds Medusa heads: one of HEADS, else one that holds tensors of such names.

    Beside an adapter other files are left alone: checkpoints lie there too.
    """
    named = next((each for each in HEADS if each in names), None)
    if named is not None or CONFIG in names:
        return named
    others = sorted(each for each in names if each.endswith(".safetensors") and each not in WEIGHTS)
    return next((each for each in others[:_MOST_UNNAMED] if _HEADS_KEY.search(peek(each))), None)


def choose(sizes: Mapping[str, int | None], name: str, limit: int, peek: Peek) -> list[str]:
    """Names to fetch out of a listing (name → bytes, None where unknown), heads before the adapter's own weights.

    Raises AdapterInvalid where no adapter is there and AdapterTooLarge above `limit` bytes in all. `name` is for the
    message. Weights in parts (`adapter_model-00001-of-…`) come with their index.
    """
    heads = find_heads(sizes.keys(), peek)
    if CONFIG not in sizes and (heads is None or _weights(sizes)):
        raise AdapterInvalid(f"{name} holds no {CONFIG} and no {HEADS[0]}, so it is not an adapter")
    weights = _weights(sizes)
    if CONFIG in sizes and not weights:
        raise AdapterInvalid(f"{name} holds no {' and no '.join(WEIGHTS)}")
    weights = weights if heads is None else [heads, *weights]
    chosen = [*sorted(SMALL_NAMES & set(sizes)), *weights]
    for each in chosen:
        size = sizes[each] or 0
        most = MAX_CONFIG_BYTES if each == CONFIG else MAX_SMALL_BYTES
        if each in SMALL_NAMES and size > most:
            raise AdapterTooLarge(f"{each} of {name} has {size} bytes, the most is {most}")
    total = sum(sizes[each] or 0 for each in weights)
    if total > limit:
        raise AdapterTooLarge(f"the weights of {name} have {total} bytes, this server takes {limit}")
    return chosen


def _weights(sizes: Mapping[str, int | None]) -> list[str]:
    for whole in WEIGHTS:
        if whole in sizes:
            return [whole]
        stem, dot, ending = whole.rpartition(".")
        index = f"{whole}.index.json"
        parts = sorted(each for each in sizes if each.startswith(f"{stem}-") and each.endswith(dot + ending))
        if index in sizes and parts and not any("/" in part for part in parts):
            return [index, *parts]
    return []

"""The interface of a source, which files of a listing form an adapter, and their size limits. Imports no torch.

The router calls `resolve` and `small_files` with the caller's token; the loader's process calls `fetch`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lorikeet.adapters.errors import AdapterInvalid, AdapterNotFound, AdapterTooLarge
from lorikeet.adapters.refs import Pin, Ref

CONFIG = "adapter_config.json"
SMALL_NAMES = frozenset(
    {CONFIG, "config.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json", "tokenizer.json"}
)
"""Files that are read in addition to the weights, if present."""
MAX_SMALL_BYTES = 32 << 20
"""Maximum bytes of one small file: the largest tokenizers have about 20 MiB."""
MAX_CONFIG_BYTES = 1 << 20
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""By preference."""
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Names of files with Medusa heads, by preference."""
HEADS_CONFIG = "config.json"
PEEK_BYTES = 64 << 10
"""This many bytes from the start of a file show whether it contains Medusa heads."""
_MAX_UNNAMED = 8
_HEADS_KEY = re.compile(rb'"\d{1,4}\.\d{1,4}\.(linear\.)?weight" *:')

Within = Callable[[float], None]
"""Called with a time limit in seconds for the part that follows."""

Peek = Callable[[str], bytes]
"""The first PEEK_BYTES of a file, by name."""


@dataclass(frozen=True)
class FileHead:
    """The beginning of one file."""

    content: bytes
    size: int
    """Bytes of the whole file."""


@dataclass(frozen=True)
class Resolved:
    """A name as its source resolved it for one caller."""

    pin: Pin
    is_public: bool
    """Whether anyone may use it, without any token."""
    real_id: str = ""
    """Its one spelling, as in `real_ids`, if only the source knows it."""


def unbounded(seconds: float) -> None:
    """For callers without a time limit."""


class AdapterSource(Protocol):
    """One type of source. Every method raises leaves of AdapterError and nothing else."""

    async def resolve(self, ref: Ref, token: str | None) -> Resolved:
        """Resolve a name to a version. Success also proves that the caller may use it."""

    def real_ids(self, id: str) -> frozenset[str]:
        """What `id` may name, whether it exists or not, in one spelling for all that mean the same adapter.

        Blocks: called in a thread.
        """

    def missing(self, ref: Ref, token: str | None) -> AdapterNotFound:
        """The error for a name that does not exist."""

    async def small_files(
        self, pin: Pin, token: str | None, names: frozenset[str] = SMALL_NAMES, max_bytes: int = MAX_SMALL_BYTES
    ) -> dict[str, bytes]:
        """The files of `names` that exist. Raises AdapterTooLarge for one above `max_bytes`."""

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within = unbounded) -> Path:
        """Download the files; returns the path of a folder with CONFIG and one of WEIGHTS (or an index and parts), with
        heads, or with both.

        `folder` belongs only to this pin; it may hold the files of an earlier attempt, which is resumed. If the files
        are already on this machine, their own folder is returned. Sizes are checked against the limit before any
        weights are transferred. Blocks: called in a thread. If the source may stall, `within` is called with the
        time limit of each part.
        """

    def heads(self, pin: Pin, token: str | None, num_bytes: int) -> dict[str, FileHead]:
        """At most the first `num_bytes` bytes of each weight file. Blocks: called in a thread."""

    async def close(self) -> None:
        """Close connections."""


def parts(chosen: Iterable[str]) -> list[str]:
    """The chosen files that hold weights."""
    return [name for name in chosen if name not in SMALL_NAMES and not name.endswith(".index.json")]


def find_heads(names: Collection[str], peek: Peek) -> str | None:
    """The file of a folder that contains Medusa heads: one of HEADS, else one with tensors of such names.

    Next to an adapter, only the names of HEADS count: checkpoints may be stored there too.
    """
    named = next((file for file in HEADS if file in names), None)
    if named is not None or CONFIG in names:
        return named
    others = sorted(file for file in names if file.endswith(".safetensors") and file not in WEIGHTS)
    return next((file for file in others[:_MAX_UNNAMED] if _HEADS_KEY.search(peek(file))), None)


def gguf_file(names: Collection[str]) -> str | None:
    """The file of an adapter of llama.cpp, in a folder that holds no other one. Raises AdapterInvalid for several."""
    files = [] if CONFIG in names else sorted(name for name in names if name.endswith(".gguf"))
    if len(files) > 1:
        raise AdapterInvalid(f"it holds {len(files)} .gguf files: an adapter is a folder with one")
    return files[0] if files else None


def choose(sizes: Mapping[str, int | None], name: str, limit: int, peek: Peek) -> list[str]:
    """Names to fetch out of a listing (name → bytes, None if unknown), heads before the adapter's own weights.

    Raises AdapterInvalid if the listing contains no adapter and AdapterTooLarge above `limit` bytes in all. `name` is
    for the message. Weights in parts (`adapter_model-00001-of-…`) come with their index.
    """
    heads, weights = find_heads(sizes.keys(), peek), _weights(sizes)
    if heads is None and (gguf := gguf_file(sizes.keys())) is not None:
        weights = [gguf]
    elif CONFIG not in sizes and (heads is None or weights):
        raise AdapterInvalid(f"{name} holds no {CONFIG} and no {HEADS[0]}, so it is not an adapter")
    if CONFIG in sizes and not weights:
        raise AdapterInvalid(f"{name} holds no {' and no '.join(WEIGHTS)}")
    weights = weights if heads is None else [heads, *weights]
    small = sorted(SMALL_NAMES & set(sizes))
    for file in small:
        size, max_bytes = sizes[file] or 0, MAX_CONFIG_BYTES if file == CONFIG else MAX_SMALL_BYTES
        if size > max_bytes:
            raise AdapterTooLarge(f"{file} of {name} has {size} bytes; the limit is {max_bytes}")
    total = sum(sizes[file] or 0 for file in weights)
    if total > limit:
        raise AdapterTooLarge(f"the weights of {name} have {total} bytes; this server accepts {limit}")
    return [*small, *weights]


def _weights(sizes: Mapping[str, int | None]) -> list[str]:
    for file in WEIGHTS:
        if file in sizes:
            return [file]
        stem, dot, ending = file.rpartition(".")
        index = f"{file}.index.json"
        parts = sorted(name for name in sizes if name.startswith(f"{stem}-") and name.endswith(dot + ending))
        if index in sizes and parts and not any("/" in part for part in parts):
            return [index, *parts]
    return []

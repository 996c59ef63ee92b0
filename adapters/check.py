"""Validates adapters for one base: `AdapterValidator`, and the command `lorikeet adapters check PATH`.

Configurations, tokenizers and the headers of weight files are read, and `Contents.decide` decides as in the loader.
The command lists which adapters would be served, and why not others. It reads weights with `--read-weights`, and those
of a local adapter if they contain parameters of the base, which must not differ. The first validator loads the
libraries.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lorikeet.adapters import catalogue, refs
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.formats import configuration
from lorikeet.adapters.formats.configuration import Tokenizers
from lorikeet.adapters.formats.header import MAX_HEADER, PREFIX, header_len
from lorikeet.adapters.refs import Pin, Ref, SourceKind
from lorikeet.adapters.sources import hub
from lorikeet.adapters.sources.base import CONFIG, SMALL_NAMES, AdapterSource, FileHead
from lorikeet.adapters.sources.registry import DEFAULT_MAX_ADAPTER_BYTES, Sources, SourceSettings
from lorikeet.proto.gguf.header import Header

if TYPE_CHECKING:
    from lorikeet.adapters.formats.changes import PlannedReader
    from lorikeet.adapters.formats.layout import Base, Contents, ServedContents


_FIRST_BYTES = 256 << 10


_LARGE = frozenset({"tokenizer.json"})
"""Not downloaded: smaller files list the tokens that were added to the base's tokenizer."""


@dataclass(frozen=True)
class Headers:
    """What is known of an adapter without its weights."""

    small: Mapping[str, bytes]
    """The small files by name."""
    heads: Mapping[str, FileHead]
    """The beginnings of the weight files by name."""


@dataclass(frozen=True)
class Validation:
    """An adapter that would be served, as far as its files were read."""

    rank: int
    """The largest of its modules, 0 if it changes none."""
    num_modules: int | None
    num_bytes: int
    num_heads: int | None = 0
    """Medusa heads; None if their file has no header."""
    unread: tuple[str, ...] = ()
    """Parameters whose values decide and were not read: they must equal the base's."""
    warnings: tuple[str, ...] = ()

    @property
    def has_headers(self) -> bool:
        """Whether each weight file could be read as far as was asked for."""
        return self.num_modules is not None and self.num_heads is not None


class AdapterValidator:
    """Validates adapters for the base in one folder."""

    def __init__(self, reader: "PlannedReader", tokenizers: Tokenizers, base: "Base") -> None:
        self._reader, self._tokenizers, self._base = reader, tokenizers, base

    @classmethod
    def load(cls, model_path: Path, trust_remote_code: bool = False, num_extra: int = 0) -> Self:
        """`num_extra`: `--adapter-extra-vocab-size`. Raises ValueError or OSError if the folder holds no model."""
        from lorikeet.adapters.formats.base_model import BaseValues, Skeleton, choose_dtype
        from lorikeet.adapters.formats.changes import PlannedReader
        from lorikeet.adapters.formats.layout import Base

        skeleton = Skeleton(model_path, trust_remote_code, num_extra=num_extra)
        dtype, kinds = choose_dtype(None, skeleton.config, "cpu"), frozenset(configuration.SERVED_KINDS)
        base = Base("", "", dtype, kinds, BaseValues(skeleton), configuration.MOST_RANK["cpu"])
        return cls(PlannedReader(skeleton), Tokenizers(model_path), base)

    def validate(self, headers: Headers) -> Validation:
        """By headers: problems of values are not seen. Raises AdapterInvalid or NotServed with the reason."""
        from lorikeet.adapters.formats import layout

        opened = layout.adapter_of_headers(headers.small, headers.heads, self._reader.skeleton)
        skeleton = self._reader.skeleton
        self._tokenizers.check_files(dict(headers.small), skeleton.num_ids(opened.num_added(skeleton)))
        num_bytes = sum(head.size for head in headers.heads.values())
        return _validation(opened, opened.decide(self._reader, self._base), num_bytes)

    def validate_folder(self, folder: Path, max_bytes: int) -> Validation:
        """By all bytes of its files, as the loader does. Raises AdapterError with the reason."""
        from lorikeet.adapters.formats import layout

        with layout.open_adapter(folder, max_bytes, self._reader.skeleton) as opened:
            skeleton = self._reader.skeleton
            self._tokenizers.check(folder, skeleton.num_ids(opened.num_added(skeleton)))
            served, _ = opened.lay_out(self._reader, self._base)
            return _validation(opened, served, opened.num_bytes)


def _validation(opened: "Contents", served: "ServedContents", num_bytes: int) -> Validation:
    decision, heads = served.decision, served.heads
    num_modules: int | None = 0
    if opened.values is not None:
        num_modules = None if decision is None else len(decision.changes)
    num_heads: int | None = 0
    if opened.heads_name:
        num_heads = None if heads is None else heads.shape.num_heads
    unread = () if decision is None else decision.unread
    return Validation(served.rank, num_modules, num_bytes, num_heads, unread, served.warnings)


async def read_headers(source: AdapterSource, pin: Pin, token: str | None) -> Headers:
    """What is known of an adapter without its weights. Raises AdapterError."""
    names = SMALL_NAMES if pin.source is SourceKind.LOCAL else SMALL_NAMES - _LARGE
    small = await source.small_files(pin, token, names)
    return Headers(small, await asyncio.to_thread(_heads, source, pin, token))


def _heads(source: AdapterSource, pin: Pin, token: str | None) -> dict[str, FileHead]:
    heads = source.heads(pin, token, _FIRST_BYTES)
    longest = max((_needed(name, head) for name, head in heads.items()), default=0)
    return heads if longest <= _FIRST_BYTES else source.heads(pin, token, min(longest, PREFIX + MAX_HEADER))


def _needed(name: str, head: FileHead) -> int:
    """Bytes of the file's header."""
    if name.endswith(".gguf"):
        return _needed_gguf(head)
    if not name.endswith(".safetensors"):
        return 0
    try:
        return PREFIX + header_len(head.content, head.size, name)
    except AdapterError:
        return 0  # the error is raised when the header is parsed


def _needed_gguf(head: FileHead) -> int:
    """0 if the header was read as a whole, else as much as is ever read: its length is not stored."""
    try:
        Header(head.content, head.size)
    except ValueError:
        return min(head.size, PREFIX + MAX_HEADER)
    return 0


_MAX_CONCURRENT = 16


_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGING_FACE_HUB_API_TOKEN")


@dataclass
class CheckRow:
    """One adapter of the catalogue."""

    alias: str
    id: str
    state: str
    """served, refused, or unseen: values that were not read decide."""
    reason: str = ""
    rank: int | None = None
    modules: int | None = None
    heads: int | None = None
    """Medusa heads."""
    num_bytes: int | None = None


_EXAMPLES = """examples:
  lorikeet adapters check ./my-adapter
  lorikeet adapters check ./my-adapter --model-id owner/name
  lorikeet adapters check adapters.yaml --model-id ./model --local-adapter-root ./adapters --json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every adapter would be served, 1 if one would not, 2 if the check itself failed."""
    options = parser().parse_args(arguments)
    try:
        rows = asyncio.run(_check(options))
    except (catalogue.CatalogueError, AdapterError, ValueError, OSError) as error:
        print(f"lorikeet-adapters: {error}", file=sys.stderr)
        return 2
    print(_json(rows) if options.json else _table(rows))
    return 1 if any(row.state == "refused" for row in rows) else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="lorikeet-adapters",
        description="Check adapters before serving them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check = result.add_subparsers(dest="verb", required=True).add_parser(
        "check", help="list which adapters of a catalogue or folder would be served, and why not others"
    )
    check.add_argument("path", help="an adapter's folder, a folder of such folders, or a catalogue (YAML)")
    check.add_argument("--model-id", help="base model: folder or hub id (default: the one that the adapters name)")
    check.add_argument("--revision", help="revision of the base model at the hub")
    check.add_argument(
        "--default-adapter-source", default="hub", choices=[source.value for source in catalogue.SOURCES]
    )
    check.add_argument("--local-adapter-root", action="append", help="folder of local adapters; repeatable")
    check.add_argument("--huggingface-hub-cache", help="cache folder of the hub library")
    check.add_argument("--max-adapter-size", type=int, default=DEFAULT_MAX_ADAPTER_BYTES, help="limit in bytes")
    check.add_argument("--adapter-extra-vocab-size", type=int, default=0, help="as the server's flag; default 0")
    check.add_argument("--read-weights", action="store_true", help="read all weights, and download those of hubs")
    check.add_argument("--trust-remote-code", action="store_true", help="run code from the base model's repository")
    check.add_argument("--json", action="store_true", help="one JSON object per adapter")
    return result


async def _check(options: argparse.Namespace) -> list[CheckRow]:
    folders = _adapter_folders(Path(options.path))
    if folders:
        refs, problems = [(Path(folder).name, Ref(SourceKind.LOCAL, folder)) for folder in folders], {}
    else:
        listed = catalogue.read(options.path, SourceKind(options.default_adapter_source))
        refs = [(alias, version.ref) for alias, entry in listed.entries.items() for version in entry.versions]
        problems = dict(listed.problems)
    options.model_id = options.model_id or _named_base(folders)
    sources = Sources(_settings(options, folders))
    token = next((os.environ[name] for name in _TOKENS if os.environ.get(name)), None)
    gate = asyncio.Semaphore(_MAX_CONCURRENT)

    async def read(ref: Ref) -> _Found | AdapterError:
        async with gate:
            try:
                source = sources[ref.source]
                pin = (await source.resolve(ref, token)).pin
                return _Found(pin, await read_headers(source, pin, token))
            except AdapterError as error:
                return error

    def validated(adapter: _Found, validator: AdapterValidator) -> Validation:
        validation, pin = validator.validate(adapter.headers), adapter.pin
        if not options.read_weights and not (validation.unread and pin.source is SourceKind.LOCAL):
            return validation
        with tempfile.TemporaryDirectory() as folder:
            fetched = sources[pin.source].fetch(pin, token, Path(folder))
            return validator.validate_folder(fetched, options.max_adapter_size)

    # while sources answer, the libraries load and the base's skeleton is built
    loading = asyncio.create_task(asyncio.to_thread(_validator, options, token))
    try:
        adapters = await asyncio.gather(*(read(ref) for _, ref in refs))
        validator = await loading
        rows = [
            await asyncio.to_thread(_row, alias, ref, adapter, lambda one: validated(one, validator))
            for (alias, ref), adapter in zip(refs, adapters, strict=True)
        ]
    finally:
        await sources.close()
    return [*rows, *(CheckRow(alias, "", "refused", reason) for alias, reason in problems.items())]


def _adapter_folders(path: Path) -> list[str]:
    """The adapter's folder at the path, or those directly below it; none if it is a file. Raises ValueError."""
    if not path.is_dir():
        return []
    folders = [path] if _is_adapter(path) else [folder for folder in sorted(path.iterdir()) if _is_adapter(folder)]
    if not folders:
        raise ValueError(f"neither the folder {path} nor one directly below it has an {CONFIG} or one .gguf file")
    return [os.path.realpath(folder) for folder in folders]


def _named_base(folders: Sequence[str]) -> str:
    """The base that all configurations name. Raises AdapterError, or ValueError unless it is one, and there."""
    files = [path for path in (Path(folder) / CONFIG for folder in folders) if path.exists()]
    names = {str(configuration.parse(path.read_bytes()).get("base_model_name_or_path") or "") for path in files} - {""}
    if len(names) != 1:
        raise ValueError(f"--model-id is needed: the adapters name {'several bases' if names else 'no base'}")
    name = names.pop()
    if os.path.isabs(name) and not os.path.isdir(name):
        raise ValueError(f"--model-id is needed: the adapters name the base {name}, which is not on this machine")
    return name


def _is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).exists() or len(list(folder.glob("*.gguf"))) == 1


@dataclass(frozen=True)
class _Found:
    """One adapter at its source."""

    pin: Pin
    headers: Headers


def _settings(options: argparse.Namespace, folders: Sequence[str]) -> SourceSettings:
    named = options.local_adapter_root or [root for root in os.environ.get("LOCAL_ADAPTER_ROOT", "").split(":") if root]
    cache = options.huggingface_hub_cache or os.environ.get("HF_HUB_CACHE")
    return SourceSettings(
        local_roots=(*named, *folders),
        local_folders=tuple(folders),
        hub_cache=cache,
        max_adapter_bytes=options.max_adapter_size,
    )


def _validator(options: argparse.Namespace, token: str | None) -> AdapterValidator:
    return AdapterValidator.load(_base(options, token), options.trust_remote_code, options.adapter_extra_vocab_size)


def _base(options: argparse.Namespace, token: str | None) -> Path:
    """A folder with the base's configuration and tokenizer, without its weights."""
    if Path(options.model_id).is_dir():
        return Path(options.model_id)
    ref = refs.parse(options.model_id)
    try:
        folder = hub.library().snapshot_download(
            ref.id,
            revision=ref.revision or options.revision,
            allow_patterns=["*.json", "*.model", "*.py", "*.txt"],
            ignore_patterns=["*.index.json"],
            cache_dir=options.huggingface_hub_cache,
            token=token or False,
        )
    except Exception as error:  # any error of the library's HTTP client
        raise ValueError(f"the base {options.model_id} cannot be downloaded: {type(error).__name__}") from None
    return Path(folder)


def _row(alias: str, ref: Ref, adapter: _Found | AdapterError, validated: Callable[[_Found], Validation]) -> CheckRow:
    try:
        if isinstance(adapter, AdapterError):
            raise adapter
        validation = validated(adapter)
    except AdapterError as error:
        return CheckRow(alias, str(ref), "refused", str(error))
    state, reason = "served", "; ".join(validation.warnings)
    if not validation.has_headers:
        state, reason = "unseen", "a file without a header (.bin, .pt) is checked when it is loaded"
    elif validation.unread:
        state, reason = "unseen", f"{validation.unread[0]} is compared with the base's when it is loaded"
    sizes = (validation.rank, validation.num_modules, validation.num_heads, validation.num_bytes)
    return CheckRow(alias, str(ref), state, reason, *sizes)


def _json(rows: Sequence[CheckRow]) -> str:
    return "\n".join(json.dumps(asdict(row)) for row in rows)


def _table(rows: Sequence[CheckRow]) -> str:
    lines: list[tuple[str, ...]] = [("ALIAS", "STATE", "RANK", "MODULES", "HEADS", "BYTES", "ADAPTER", "REASON")]
    for row in rows:
        numbers = (row.rank, row.modules, row.heads, row.num_bytes)
        cells = ("" if number is None else str(number) for number in numbers)
        lines.append((row.alias, row.state, *cells, row.id, row.reason))
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    table = ["  ".join([*map(str.ljust, line[:7], widths), line[7]]).rstrip() for line in lines]
    num_refused = sum(row.state == "refused" for row in rows)
    return "\n".join([*table, "", f"{len(rows) - num_refused} of {len(rows)} adapters would be served"])


if __name__ == "__main__":
    sys.exit(main())

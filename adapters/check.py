"""`lorikeet adapters check PATH --model-id M`: which adapters would be served, and why not others.

PATH is an adapter's folder, a folder of such folders, or a catalogue.

Reads configurations, tokenizers and the headers of weight files, and decides by them as the loader does. Weights are
read with `--read-weights`, and those of a local adapter if they contain parameters of the base, which must not differ.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lorikeet.adapters import catalogue, refs
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.refs import Pin, Ref, Source
from lorikeet.adapters.sources import hub
from lorikeet.adapters.sources.base import CONFIG
from lorikeet.adapters.sources.registry import DEFAULT_MAX_ADAPTER_BYTES, Sources, SourceSettings
from lorikeet.adapters.validation import AdapterValidator, Headers, Validation, read_headers

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
    check.add_argument("--model-id", required=True, help="base model: folder or hub id")
    check.add_argument("--revision", help="revision of the base model at the hub")
    check.add_argument(
        "--default-adapter-source", default="hub", choices=[source.value for source in catalogue.SOURCES]
    )
    check.add_argument("--local-adapter-root", action="append", help="folder of local adapters; repeatable")
    check.add_argument("--huggingface-hub-cache", help="cache folder of the hub library")
    check.add_argument("--max-adapter-size", type=int, default=DEFAULT_MAX_ADAPTER_BYTES, help="limit in bytes")
    check.add_argument("--read-weights", action="store_true", help="read all weights, and download those of hubs")
    check.add_argument("--trust-remote-code", action="store_true", help="run code from the base model's repository")
    check.add_argument("--json", action="store_true", help="one JSON object per adapter")
    return result


async def _check(options: argparse.Namespace) -> list[CheckRow]:
    folders = _adapter_folders(Path(options.path))
    if folders:
        refs, problems = [(Path(folder).name, Ref(Source.LOCAL, folder)) for folder in folders], {}
    else:
        listed = catalogue.read(options.path, Source(options.default_adapter_source))
        refs = [(alias, version.ref) for alias, entry in listed.entries.items() for version in entry.versions]
        problems = dict(listed.problems)
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
        if not options.read_weights and not (validation.unread and pin.source is Source.LOCAL):
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
    folders = [path] if (path / CONFIG).exists() else [config.parent for config in sorted(path.glob(f"*/{CONFIG}"))]
    if not folders:
        raise ValueError(f"neither the folder {path} nor one directly below it has an {CONFIG}")
    return [os.path.realpath(folder) for folder in folders]


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
    return AdapterValidator.load(_base(options, token), options.trust_remote_code)


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

"""`lorikeet-adapters check FILE --model-id M`: which adapters of a catalogue would be served, and why not others.

Reads configurations, tokenizers and the headers of weight files, never the weights: what only their values tell (NaN,
whether a saved bias is the base's own) is found when an adapter is loaded.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lorikeet.adapters import catalogue, refs
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.judging import AdapterValidator, Headers, look
from lorikeet.adapters.refs import Ref, Source
from lorikeet.adapters.sources.base import AdapterSource
from lorikeet.adapters.sources.registry import Sources
from lorikeet.adapters.sources.settings import DEFAULT_MAX_ADAPTER_BYTES, SourceSettings

_AT_ONCE = 16
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGING_FACE_HUB_API_TOKEN")


@dataclass
class Row:
    """One adapter of the catalogue."""

    alias: str
    id: str
    state: str
    """served, refused, or unseen: weights without a header are looked into when they are loaded."""
    reason: str = ""
    rank: int | None = None
    modules: int | None = None
    heads: int | None = None
    """Medusa heads."""
    num_bytes: int | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every adapter would be served, 1 where one would not, 2 where nothing could be checked."""
    options = _parser().parse_args(arguments)
    try:
        rows = asyncio.run(_check(options))
    except (catalogue.CatalogueError, AdapterError, ValueError, OSError) as error:
        print(f"lorikeet-adapters: {error}", file=sys.stderr)
        return 2
    print(_json(rows) if options.json else _table(rows))
    return 1 if any(row.state == "refused" for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lorikeet-adapters", description="Look at adapters before a server does.")
    check = parser.add_subparsers(dest="verb", required=True).add_parser(
        "check", help="which adapters of a catalogue would be served, and why not others"
    )
    check.add_argument("file", help="the catalogue: a YAML file of aliases")
    check.add_argument("--model-id", required=True, help="the base: a folder, or an id at the hub")
    check.add_argument("--revision", help="of the base at the hub")
    check.add_argument("--default-adapter-source", default="hub", choices=[each.value for each in catalogue.SOURCES])
    check.add_argument("--local-adapter-root", action="append", help="where local adapters lie; repeatable")
    check.add_argument("--huggingface-hub-cache", help="folder of the hub's library")
    check.add_argument("--max-adapter-size", type=int, default=DEFAULT_MAX_ADAPTER_BYTES, help="bytes of weights")
    check.add_argument("--trust-remote-code", action="store_true", help="run the base's own code")
    check.add_argument("--json", action="store_true", help="one JSON object per adapter")
    return parser


async def _check(options: argparse.Namespace) -> list[Row]:
    listed = catalogue.read(options.file, Source(options.default_adapter_source))
    sources = Sources(_settings(options))
    token = next((os.environ[name] for name in _TOKENS if os.environ.get(name)), None)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def see(row: Row, ref: Ref) -> tuple[Row, Headers | None]:
        async with gate:
            try:
                return row, await _see(sources[ref.source], ref, token)
            except AdapterError as error:
                return _refused(row, error), None

    wanted = [(Row(alias, str(version.ref), "served"), version.ref) for alias, version in _versions(listed)]
    # while sources answer, the libraries load and the base's skeleton is made
    validate = asyncio.create_task(asyncio.to_thread(_validate, options, token))
    try:
        seen = await asyncio.gather(*(see(row, ref) for row, ref in wanted))
        ready = await validate
        rows = [_validated(ready, row, each) for row, each in seen]
    finally:
        await sources.close()
    return [*rows, *(Row(alias, "", "refused", reason) for alias, reason in listed.problems.items())]


def _versions(listed: catalogue.Catalogue) -> list[tuple[str, catalogue.Version]]:
    return [(alias, version) for alias, entry in listed.entries.items() for version in entry.versions]


def _settings(options: argparse.Namespace) -> SourceSettings:
    named = options.local_adapter_root or [root for root in os.environ.get("LOCAL_ADAPTER_ROOT", "").split(":") if root]
    cache = options.huggingface_hub_cache or os.environ.get("HF_HUB_CACHE")
    return SourceSettings(local_roots=tuple(named), hub_cache=cache, max_adapter_bytes=options.max_adapter_size)


def _validate(options: argparse.Namespace, token: str | None) -> AdapterValidator:
    return AdapterValidator(_base(options, token), options.trust_remote_code)


def _base(options: argparse.Namespace, token: str | None) -> Path:
    """A folder with the base's configuration and tokenizer; its weights are not needed."""
    if Path(options.model_id).is_dir():
        return Path(options.model_id)
    ref = refs.parse(options.model_id)
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            ref.id,
            revision=ref.revision or options.revision,
            allow_patterns=["*.json", "*.model", "*.py", "*.txt"],
            ignore_patterns=["*.index.json"],
            cache_dir=options.huggingface_hub_cache,
            token=token or False,
        )
    except Exception as error:  # of whichever HTTP client the library is built on
        raise ValueError(f"the base {options.model_id} cannot be had: {type(error).__name__}") from None
    return Path(found)


async def _see(source: AdapterSource, ref: Ref, token: str | None) -> Headers:
    """What can be known of an adapter without its weights. Raises AdapterError."""
    return await look(source, (await source.resolve(ref, token)).pin, token)


def _validated(validate: AdapterValidator, row: Row, seen: Headers | None) -> Row:
    if seen is None:
        return row
    try:
        verdict = validate.validate(seen)
    except AdapterError as error:
        return _refused(row, error)
    row.rank, row.modules, row.num_bytes = verdict.rank, verdict.num_modules, verdict.num_bytes
    row.heads, row.reason = verdict.num_heads, "; ".join(verdict.notes)
    if not verdict.is_whole:
        row.state, row.reason = "unseen", "a file without a header (.bin, .pt) is looked into when it is loaded"
    return row


def _refused(row: Row, error: AdapterError) -> Row:
    row.state = "refused"
    row.reason = str(error)
    return row


def _json(rows: Sequence[Row]) -> str:
    return "\n".join(json.dumps(asdict(row)) for row in rows)


def _table(rows: Sequence[Row]) -> str:
    lines = [("ALIAS", "STATE", "RANK", "MODULES", "HEADS", "BYTES", "ADAPTER", "REASON")]
    for row in rows:
        known = (row.rank, row.modules, row.heads, row.num_bytes)
        rank, modules, heads, num_bytes = ("" if number is None else str(number) for number in known)
        lines.append((row.alias, row.state, rank, modules, heads, num_bytes, row.id, row.reason))
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    table = ["  ".join([*map(str.ljust, line[:7], widths), line[7]]).rstrip() for line in lines]
    num_refused = sum(row.state == "refused" for row in rows)
    return "\n".join([*table, "", f"{len(rows) - num_refused} of {len(rows)} adapters would be served"])


if __name__ == "__main__":
    sys.exit(main())

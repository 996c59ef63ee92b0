"""`lorikeet-keys`: adds, lists and removes the keys of the file of --api-keys, which holds hashes only."""

import argparse
import fcntl
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lorikeet.adapters import keys
from lorikeet.adapters.catalogue import CatalogueError
from lorikeet.launcher.cli.client import command_parser

_FIELDS = ("admin", "isolate", "adapters", "requests_per_minute", "tokens_per_minute", "concurrency", "weight")

_EXAMPLES = """examples:
  lorikeet-keys add team-a --adapters support triage --rate 600
  lorikeet-keys add ops --admin
  lorikeet-keys list
  lorikeet-keys remove team-a
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process: 0, or 1 with one sentence."""
    options = parser().parse_args(arguments)
    path = Path(options.file or os.environ.get("API_KEYS") or "keys.yaml")
    try:
        print(_RUN[options.command](path, options))
    except (CatalogueError, OSError) as error:
        print(f"lorikeet-keys: {error}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_parser(
        "lorikeet-keys", "API keys of a server. SIGHUP to its launcher makes it read the file again.", _EXAMPLES
    )
    text = "the file of --api-keys (default: the variable API_KEYS, else keys.yaml)"
    result.add_argument("--file", help=text)
    file = argparse.ArgumentParser(add_help=False)  # the flag may follow the command too
    file.add_argument("--file", default=argparse.SUPPRESS, help=text)
    commands = result.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", parents=[file], help="create a key and print it once")
    add.add_argument("name")
    add.add_argument("--admin", action="store_true", help="may use the administration routes and every adapter")
    add.add_argument(
        "--isolate",
        action="store_true",
        help="shares no cached prefixes, and its outputs are never history drafts",
    )
    add.add_argument("--adapters", nargs="+", metavar="NAME", help="the only aliases or ids that it may use")
    limits = (("rate", "requests_per_minute", float, "generation requests per minute"),
              ("tokens", "tokens_per_minute", float, "tokens of prompts and outputs per minute"),
              ("concurrency", "concurrency", int, "generation requests at a time"))  # fmt: skip
    for flag, field, kind, meaning in limits:
        add.add_argument(f"--{flag}", dest=field, type=kind, metavar="N", help=f"maximum number of {meaning}")
    text = "its share of the server next to other keys, which have 1 each"
    add.add_argument("--weight", type=float, metavar="X", help=text)
    commands.add_parser("list", parents=[file], help="show the keys' names, rights and limits")
    remove = commands.add_parser("remove", parents=[file], help="close a key; its hash stays in the file")
    remove.add_argument("name")
    return result


def _add(path: Path, options: argparse.Namespace) -> str:
    key = f"sk-{secrets.token_urlsafe(32)}"
    entry = {"name": options.name, "sha256": keys.sha256(key)}
    values = {field: getattr(options, field) for field in _FIELDS}
    entry |= {field: value for field, value in values.items() if value is not None and value is not False}
    with _changing(path) as entries:
        entries.append(entry)
    return key


def _remove(path: Path, options: argparse.Namespace) -> str:
    with _changing(path) as entries:
        named = [entry for entry in entries if entry["name"] == options.name and not entry.get("removed")]
        for entry in named:
            entry["removed"] = True
        if not named:
            raise CatalogueError(f"{path} has no key {options.name!r}")
    return f"{options.name} is removed"


def _list(path: Path, options: argparse.Namespace) -> str:
    keys.read(path)
    current = [entry for entry in keys.entries(path.read_bytes()) if not entry.get("removed")]
    return "\n".join(
        " ".join([entry["name"], *(f"{field}={entry[field]}" for field in _FIELDS if entry.get(field))])
        for entry in current
    )


@contextmanager
def _changing(path: Path) -> Iterator[list[Any]]:
    """The entries of the file, which are written back as a whole. Raises CatalogueError or OSError."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = []
        if path.exists():
            keys.read(path)
            entries = keys.entries(path.read_bytes())
        yield entries
        text = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, default_flow_style=None, width=4096)
        keys.parse(text)
        descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o600)
        os.replace(name, path)


_RUN = {"add": _add, "list": _list, "remove": _remove}


if __name__ == "__main__":
    sys.exit(main())

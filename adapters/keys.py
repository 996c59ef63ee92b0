"""The server's own API keys: names, rights, limits, and isolation of cached prefixes. Imports no torch.

Only hashes of keys are stored, in the file and in memory.
"""

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lorikeet.adapters.catalogue import CatalogueError, load_yaml, read_with
from lorikeet.proto.shares import LEAST_WEIGHT, MOST_WEIGHT

_HASH = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency", "weight")
_FIELDS = ("name", "sha256", "admin", "isolate", "adapters", *_LIMITS, "removed")


@dataclass(frozen=True, slots=True)
class Key:
    """One API key. A limit is None if there is none."""

    name: str
    admin: bool = False
    """Whether it may use the admin API."""
    isolate: bool = True
    """Whether its requests share cached prefixes only among themselves."""
    is_marked_isolate: bool = False
    """Whether the file says `isolate: true`: then no output of its requests is kept for history drafts either."""
    adapters: frozenset[str] | None = None
    """The only adapters that it may use, by alias or id; None means all that are not closed to it."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Limit on prompt tokens and output tokens together."""
    concurrency: int | None = None
    """Generation requests at a time."""
    weight: float = 1.0
    """Its share of the server next to other keys."""


class Keys:
    """All keys of one server; `admin_sha256` is the hash of the administrator's own."""

    def __init__(
        self, keys: Iterable[tuple[str, Key]] = (), admin_sha256: str | None = None, removed: Iterable[str] = ()
    ) -> None:
        """`removed` are the hashes of former keys."""
        self._by_hash = dict(keys)
        self._admin = admin_sha256
        self._removed = frozenset(removed) - self._by_hash.keys()

    def __iter__(self) -> Iterator[Key]:
        """Without the administrator's own."""
        return iter(self._by_hash.values())

    def __len__(self) -> int:
        """Without the administrator's own."""
        return len(self._by_hash)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(key.name for key in self._by_hash.values())

    @property
    def has_admin(self) -> bool:
        """Whether an administrator exists."""
        return self._admin is not None or any(key.admin for key in self._by_hash.values())

    def find(self, bearer: str | None) -> Key | None:
        """The key that `bearer` is, if any."""
        if not bearer:
            return None
        digest = sha256(bearer)
        if self._admin is not None and hmac.compare_digest(digest, self._admin):
            return Key("", admin=True, isolate=False)
        return self._by_hash.get(digest)

    def knew(self, bearer: str) -> bool:
        """Whether `bearer` is a key of this server, or was one: it is never sent to a source."""
        return self.find(bearer) is not None or sha256(bearer) in self._removed

    def after(self, former: Self) -> Self:
        """Return the keys, with those of `former` that they lack as removed ones."""
        removed = self._removed | former._removed | former._by_hash.keys()
        return type(self)(self._by_hash.items(), self._admin, removed)


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def read(
    path: str | Path, admin_sha256: str | None = None, more: Iterable[tuple[str, Key]] = (), *, isolate: bool = True
) -> Keys:
    """Read a YAML list of keys; `more` are keys that are not in the file, by their hashes.

    `isolate` is for keys that do not say so. Raises CatalogueError with one sentence.
    """
    keys, removed = read_with(lambda content: parse(content, isolate=isolate), path)
    return Keys([*more, *keys], admin_sha256, removed)


def entries(content: bytes | str) -> list[Any]:
    """The entries of a file as they are, unchecked. Raises CatalogueError."""
    values = load_yaml(content)
    if isinstance(values, dict) and list(values) == ["keys"]:
        values = values["keys"]
    if values is None:
        return []
    if not isinstance(values, list):
        raise CatalogueError("it must be a list of keys, each with a `name` and a `sha256`")
    return values


def parse(content: bytes | str, *, isolate: bool = True) -> tuple[list[tuple[str, Key]], list[str]]:
    """The keys of a file by their hashes, and the hashes of removed ones. Raises CatalogueError."""
    keys, removed = [], []
    for number, value in enumerate(entries(content), 1):
        digest, key = _key(number, value, isolate)
        if value.get("removed", False):
            removed.append(digest)
        else:
            keys.append((digest, key))
    _check_unique(keys)
    return keys, removed


def _key(number: int, fields: Any, isolate: bool) -> tuple[str, Key]:
    if not isinstance(fields, dict) or set(fields) - set(_FIELDS):
        raise CatalogueError(f"key {number} must be a mapping of {', '.join(_FIELDS)}")
    name, digest = fields.get("name"), fields.get("sha256")
    if not isinstance(name, str) or not name:
        raise CatalogueError(f"key {number} has no `name`")
    if not name.isprintable():
        raise CatalogueError(f"the name of key {number} has characters that cannot be printed")
    digest = digest.lower() if isinstance(digest, str) else ""
    if not _HASH.fullmatch(digest):
        raise CatalogueError(f"`sha256` of key {name} must be 64 hexadecimal digits: the SHA-256 hash of the key")
    for switch in ("admin", "isolate", "removed"):
        if not isinstance(fields.get(switch, False), bool):
            raise CatalogueError(f"`{switch}` of key {name} must be true or false")
    limits = {limit: _limit(name, limit, fields[limit]) for limit in _LIMITS if fields.get(limit) is not None}
    adapters = _adapters(name, fields.get("adapters"))
    is_marked = fields.get("isolate", False)
    return digest, Key(name, fields.get("admin", False), fields.get("isolate", isolate), is_marked, adapters, **limits)


def _limit(name: str, limit: str, value: Any) -> Any:
    kinds = int if limit == "concurrency" else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise CatalogueError(f"`{limit}` of key {name} must be a {'whole ' * (kinds is int)}number above 0")
    if limit == "weight" and not LEAST_WEIGHT <= value <= MOST_WEIGHT:
        raise CatalogueError(f"`weight` of key {name} must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return value


def _adapters(name: str, value: Any) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CatalogueError(f"`adapters` of key {name} must be a list of aliases or ids")
    return frozenset(value)


def _check_unique(keys: list[tuple[str, Key]]) -> None:
    names, hashes = [key.name for _, key in keys], [digest for digest, _ in keys]
    for name in names:
        if names.count(name) > 1:
            raise CatalogueError(f"key {name} is given twice")
    if len(set(hashes)) < len(hashes):
        raise CatalogueError("two keys have the same `sha256`")

"""The server's own API keys: names, admin rights, and isolation of cached prefixes. Imports no torch.

Only hashes of keys are stored, in the file and in memory.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet.adapters.catalogue import CatalogueError, load_yaml, read_with

_HASH = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("name", "sha256", "admin", "isolate")


@dataclass(frozen=True, slots=True)
class Key:
    """One key."""

    name: str
    admin: bool = False
    """Whether it may use the admin API."""
    isolate: bool = False
    """Whether its requests share cached prefixes only among themselves."""


class Keys:
    """All keys of one server; `admin_sha256` is the hash of the administrator's own."""

    def __init__(self, keys: Iterable[tuple[str, Key]] = (), admin_sha256: str | None = None) -> None:
        self._by_hash = dict(keys)
        self._admin = admin_sha256

    @property
    def names(self) -> frozenset[str]:
        return frozenset(key.name for key in self._by_hash.values())

    @property
    def has_admin(self) -> bool:
        """Whether an administrator exists."""
        return self._admin is not None or any(key.admin for key in self._by_hash.values())

    def find(self, bearer: str | None) -> Key | None:
        """The key that `bearer` is, if any. A key of this server is never sent to a source."""
        if not bearer:
            return None
        digest = sha256(bearer)
        if self._admin is not None and hmac.compare_digest(digest, self._admin):
            return Key("", admin=True)
        return self._by_hash.get(digest)


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def read(path: str | Path, admin_sha256: str | None = None) -> Keys:
    """Read a YAML list of keys. Raises CatalogueError with one sentence."""
    return Keys(read_with(_keys, path), admin_sha256)


def _keys(content: bytes) -> list[tuple[str, Key]]:
    values = load_yaml(content)
    if isinstance(values, dict) and list(values) == ["keys"]:
        values = values["keys"]
    if not isinstance(values, list):
        raise CatalogueError("it must be a list of keys, each with a `name` and a `sha256`")
    keys = [_key(number, value) for number, value in enumerate(values, 1)]
    _check_unique(keys)
    return keys


def _key(number: int, fields: Any) -> tuple[str, Key]:
    if not isinstance(fields, dict) or set(fields) - set(_FIELDS):
        raise CatalogueError(f"key {number} must be a mapping of {', '.join(_FIELDS)}")
    name, digest = fields.get("name"), fields.get("sha256")
    if not isinstance(name, str) or not name:
        raise CatalogueError(f"key {number} has no `name`")
    digest = digest.lower() if isinstance(digest, str) else ""
    if not _HASH.fullmatch(digest):
        raise CatalogueError(f"`sha256` of key {name} must be 64 hexadecimal digits: the SHA-256 hash of the key")
    for switch in ("admin", "isolate"):
        if not isinstance(fields.get(switch, False), bool):
            raise CatalogueError(f"`{switch}` of key {name} must be true or false")
    return digest, Key(name, fields.get("admin", False), fields.get("isolate", False))


def _check_unique(keys: list[tuple[str, Key]]) -> None:
    names, hashes = [key.name for _, key in keys], [digest for digest, _ in keys]
    for name in names:
        if names.count(name) > 1:
            raise CatalogueError(f"key {name} is given twice")
    if len(set(hashes)) < len(hashes):
        raise CatalogueError("two keys have the same `sha256`")

"""Names of models and adapters (`id`, `id@revision`, and their source), pins, merges, and digests. Imports no torch.

`parse` checks the syntax of a name; whether something of that name exists is for its source to find out. A digest is
the name of an adapter below the router: a hash of its content, or of its parts.
"""

import hashlib
import json
import re
import unicodedata
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.proto.config_file import is_number
from lorikeet.proto.params import MAX_MERGE_WEIGHT, MAX_MERGED

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_LONGEST = 512
MAX_ALIAS_LEN = 256
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode's categories of control, format and direction characters, halves of pairs, and ends of lines."""
HUB_PREFIX = "hub:"
"""Before a hub id, to distinguish one of a single part from names of this server."""
_PATH = re.compile(r"\.{0,2}/|~|\.{1,2}$")


class SourceKind(StrEnum):
    """Where an id is looked up. The values are what users write."""

    HUB = "hub"
    LOCAL = "local"
    S3 = "s3"
    PBASE = "pbase"


@dataclass(frozen=True)
class Ref:
    """A parsed name. `revision` is None if the user gave none."""

    source: SourceKind
    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Pin:
    """One immutable version of one adapter, as its source resolved a name. Its digest is not known yet."""

    source: SourceKind
    id: str
    """The name within the source, without a revision."""
    revision: str
    """A commit (hub), or a hash of the file listing (local, s3)."""

    def __str__(self) -> str:
        return f"{self.id}@{self.revision[:12]}"

    def as_dict(self) -> dict[str, str]:
        """The form in which the loader receives it."""
        return {"source": self.source.value, "id": self.id, "revision": self.revision}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `as_dict` wrote. Raises ValueError."""
        try:
            source, id, revision = SourceKind(values["source"]), values["id"], values["revision"]
        except KeyError as error:
            raise ValueError(f"a pin lacks {error}") from None
        if not isinstance(id, str) or not isinstance(revision, str):
            raise ValueError("a pin's id and revision must be strings")
        return cls(source, id, revision)


def parse(text: str, source: SourceKind = SourceKind.HUB) -> Ref:
    """Split `text` into id and revision. Raises ValueError with a sentence for the user.

    Only a hub id may carry a revision: a path or a bucket key may itself contain an `@`. It may begin with HUB_PREFIX.
    """
    if not text or len(text) > _LONGEST or not is_visible(text):
        raise ValueError(f"{text[:60]!r} is not a name: it is empty, too long or contains control characters")
    if source is not SourceKind.HUB:
        return Ref(source, text)
    name, at, revision = text.removeprefix(HUB_PREFIX).partition("@")
    if _PATH.match(name):
        raise ValueError(f"{name!r} is a path, not a hub id: set the source to local")
    if not _HUB_ID.fullmatch(name) or "--" in name or ".." in name or name.endswith((".git", ".", "-")):
        raise ValueError(f"{name!r} is not a hub id: use `name` or `owner/name`")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ValueError(f"{revision!r} is not a revision: use a branch, a tag or a commit")
    return Ref(source, name, revision or None)


def is_visible(text: str) -> bool:
    """Whether a text has only characters that can be seen, and none that changes how others are shown."""
    return all(unicodedata.category(character) not in _INVISIBLE for character in text)


def check_alias(name: str) -> None:
    """Raises ValueError with a sentence for a name that clients and logs could not show."""
    if not name or len(name) > MAX_ALIAS_LEN or not is_visible(name):
        raise ValueError(
            f"an alias must be a text of 1 to {MAX_ALIAS_LEN} characters, without control and direction characters"
        )


def is_plain(name: str) -> bool:
    """Whether a name is one part, as aliases and a few old hub ids are, without its revision."""
    match = _HUB_ID.fullmatch(name.partition("@")[0])
    return match is not None and match[1] is None


STRATEGIES = ("linear", "ties", "dare_linear", "dare_ties", "cat")
SIGN_METHODS = ("total", "frequency")


def adapter_digest(configuration: bytes, files: bytes) -> str:
    """From the configuration in its canonical form and a hash of the bytes of the weight files."""
    return hashlib.sha256(configuration + b"\0" + files).hexdigest()


@dataclass(frozen=True)
class Merge:
    """Several adapters merged into one, with the parameters of PEFT's `add_weighted_adapter`."""

    pins: tuple[Pin, ...]
    weights: tuple[float, ...]
    strategy: str
    density: float
    """The share of values that are kept (ties and dare)."""
    majority_sign_method: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises AdapterInvalid with a sentence for the user, or ValueError if a pin is invalid."""
        pins = tuple(Pin.from_dict(pin) for pin in values.get("pins", ()))
        weights = values.get("weights")
        weights = [1.0] * len(pins) if weights is None else weights
        strategy = values.get("strategy", "linear")
        density: Any = values.get("density")
        method = values.get("majority_sign_method") or "total"
        if not 1 <= len(pins) <= MAX_MERGED:
            raise AdapterInvalid(f"{len(pins)} adapters cannot be merged: give 1 to {MAX_MERGED}")
        if not isinstance(weights, list) or len(weights) != len(pins) or not all(map(_is_weight, weights)):
            raise AdapterInvalid(
                f"`weights` must be a list of {len(pins)} numbers from {-MAX_MERGE_WEIGHT:g} to {MAX_MERGE_WEIGHT:g},"
                " one per adapter"
            )
        if strategy not in STRATEGIES:
            raise AdapterInvalid(f"the strategy {str(strategy)[:40]!r} is not one of {', '.join(STRATEGIES)}")
        if method not in SIGN_METHODS:
            raise AdapterInvalid(f"the sign method {str(method)[:40]!r} is not one of {', '.join(SIGN_METHODS)}")
        if strategy in ("linear", "cat"):
            density = 1.0
        elif not is_number(density, 1.0) or not density > 0:
            raise AdapterInvalid(f"`{strategy}` needs a density above 0 and up to 1")
        return cls(pins, tuple(map(float, weights)), strategy, float(density), method)

    def as_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return asdict(self) | {"pins": [pin.as_dict() for pin in self.pins], "weights": list(self.weights)}

    def digest(self, parts: list[str]) -> str:
        """Digest of the merged adapter, from the digests of its parts and the parameters that the strategy uses."""
        method = self.majority_sign_method if self.strategy.endswith("ties") else None
        content = ["merge", parts, self.weights, self.strategy, self.density, method]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _is_weight(value: Any) -> bool:
    return is_number(value, MAX_MERGE_WEIGHT)

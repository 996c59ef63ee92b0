"""The names of models and adapters: `id`, `id@revision`, and the source that the id belongs to.

Knows the spelling of names only; whether something of that name exists is for a source to say. Imports no torch.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_LONGEST = 512


class Source(StrEnum):
    """Where an id is looked up. The values are what users write."""

    HUB = "hub"
    LOCAL = "local"
    S3 = "s3"
    PBASE = "pbase"


@dataclass(frozen=True)
class Ref:
    """A name as a user wrote it, taken apart. `revision` is None where the user left it open."""

    source: Source
    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


def parse(text: str, source: Source = Source.HUB) -> Ref:
    """Take `text` apart. Raises ValueError with a sentence for the user.

    Only a hub's id may carry a revision: a path or a bucket key can hold an `@` of its own.
    """
    if not text or len(text) > _LONGEST or any(ord(character) < 32 for character in text):
        raise ValueError(f"{text[:60]!r} is not a name: it is empty, too long or holds control characters")
    if source is not Source.HUB:
        return Ref(source, text)
    name, at, revision = text.partition("@")
    if not _HUB_ID.fullmatch(name) or "--" in name or ".." in name or name.endswith((".git", ".", "-")):
        raise ValueError(f"{name!r} is not a hub id: one looks like `name` or `owner/name`")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ValueError(f"{revision!r} is not a revision: a branch, a tag or a commit")
    return Ref(source, name, revision or None)

"""A pin: which version of which adapter, settled once by its source. Imports no torch."""

from dataclasses import dataclass
from typing import Any, Self

from lorikeet.adapters.refs import Source


@dataclass(frozen=True, slots=True)
class Pin:
    """One version of one adapter. What its files hold is known only once they are read (the digest)."""

    source: Source
    id: str
    """The name within the source, without a revision."""
    revision: str
    """A commit (hub), or a hash over what the files' listing says (local, s3)."""

    def __str__(self) -> str:
        return f"{self.id}@{self.revision[:12]}"

    def as_dict(self) -> dict[str, str]:
        """As calls to the loader carry it."""
        return {"source": self.source.value, "id": self.id, "revision": self.revision}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `as_dict` wrote. Raises ValueError."""
        try:
            source, id, revision = Source(values["source"]), values["id"], values["revision"]
        except KeyError as error:
            raise ValueError(f"a pin lacks {error}") from None
        if not isinstance(id, str) or not isinstance(revision, str):
            raise ValueError("a pin's id and revision are strings")
        return cls(source, id, revision)

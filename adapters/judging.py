"""Whether an adapter would be served, judged by its configuration and the headers of its weights alone.

Knows one base. The libraries that this takes are loaded with the first judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapters.errors import AdapterInvalid, NotServed
from adapters.formats import configuration
from adapters.formats.tokenizer import Tokenizers
from adapters.sources.base import CONFIG, FileHead

if TYPE_CHECKING:
    from adapters.formats.reading import Found


@dataclass(frozen=True)
class Seen:
    """What is known of an adapter without its weights."""

    small: Mapping[str, bytes]
    """The small files by name."""
    heads: Mapping[str, FileHead]
    """The beginnings of the weight files by name."""


@dataclass(frozen=True)
class Verdict:
    """An adapter that would be served, as far as that can be seen."""

    rank: int
    """The largest of its modules."""
    num_modules: int | None
    num_bytes: int
    is_whole: bool
    """Nothing was left unseen but values."""


class Judge:
    """Of adapters for the base in a folder."""

    def __init__(self, model_path: Path, trust_remote_code: bool = False) -> None:
        """Raises ValueError or OSError where the folder holds no model."""
        from adapters.formats.reader import Reader
        from adapters.formats.skeleton import Skeleton

        self._reader = Reader(Skeleton(model_path, trust_remote_code))
        self._tokenizers = Tokenizers(model_path)

    def judge(self, seen: Seen) -> Verdict:
        """Raises AdapterInvalid or NotServed with the reason."""
        from adapters.formats import weights

        if CONFIG not in seen.small:
            raise AdapterInvalid(f"there is no {CONFIG}")
        values = configuration.parse(seen.small[CONFIG])
        settings = configuration.served(values)
        self._tokenizers.check_files(dict(seen.small))
        num_bytes = sum(head.size for head in seen.heads.values())
        if not all(name.endswith(".safetensors") for name in seen.heads):
            return Verdict(max(_ranks(settings)), None, num_bytes, is_whole=False)
        found = [each for each in self._reader.read(values, weights.hollow(seen.heads)) if _is_served(each, settings)]
        return Verdict(max((each.rank for each in found), default=0), len(found), num_bytes, is_whole=True)


def _ranks(settings: Mapping[str, Any]) -> list[int]:
    return [settings.get("r", 8), *settings.get("rank_pattern", {}).values()]


def _is_served(found: "Found", settings: Mapping[str, Any]) -> bool:
    """Raises NotServed for kinds that no shard computes; False for what may well be as the base has it."""
    if found.a is not None and found.kind not in configuration.SERVED_KINDS:
        raise NotServed(f"an adapter of the kind `{found.kind}` ({found.module}) is not served")
    if found.weight is not None and settings.get("modules_to_save"):
        raise NotServed(f"a whole weight in place of the base's ({found.module}) is not served")
    return found.a is not None or found.kind == "linear"

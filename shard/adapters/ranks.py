"""Adapters of a shard of several ranks: each reads and holds its own part, and the first says when they are used."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lorikeet.shard.adapters.reader import reason_of
from lorikeet.shard.model.adapters.loading import AdapterContent, AdapterFiles
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.scheduler.adapter_slots import Content, Device

From = TypeVar("From")
To = TypeVar("To")


@dataclass(frozen=True)
class Part:
    """The first rank's part of an adapter that all ranks hold."""

    digest: str
    own: AdapterContent

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes

    @property
    def num_heads(self) -> int:
        return self.own.num_heads


class CollectiveReader:
    """Reads an adapter where all ranks can: for the thread of each that does so."""

    def __init__(self, files: AdapterFiles, group: Group) -> None:
        self._files, self._group = files, group

    def read(self, path: Path) -> AdapterContent:
        """This rank's part, once all others have theirs. Raises ValueError with a reason, on every rank or on none."""
        opened = self._all(path, self._files.open, path.stem)
        return self._all(opened, self._files.lay_out, path.stem)

    def _all(self, what: From, do: Callable[[From], To], digest: str) -> To:
        """What this rank makes of it, once every rank has."""
        found, reason = None, ""
        try:
            found = do(what)
        except Exception as error:
            reason = reason_of(error, digest)
        reason = self._group.agree(reason)
        if found is None or reason:
            raise ValueError(reason)
        return found

    def read_first(self, path: Path) -> Part:
        """The same for the first rank, which is to name it to the others."""
        return Part(path.stem, self.read(path))


class BroadcastingSlots:
    """The slots of all ranks, as the first one's bookkeeping meets them."""

    def __init__(self, own: Device, leader: Leader) -> None:
        self._own, self._leader = own, leader

    def put(self, slot: int, content: Content) -> None:
        """Let `slot` mean `content` everywhere."""
        assert isinstance(content, Part)
        self._leader.put(slot, content.digest)
        self._own.put(slot, content.own)

    def is_ready(self, slot: int) -> bool:
        """Here; the others wait for their own copies before they compute a step."""
        return self._own.is_ready(slot)

    def clear(self, slot: int) -> None:
        """Let `slot` mean nothing anywhere."""
        self._leader.clear(slot)
        self._own.clear(slot)

    def forget(self, digest: str) -> None:
        """Nobody holds it any more."""
        self._leader.forget(digest)

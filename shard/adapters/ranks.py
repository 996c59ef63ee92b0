"""Adapters of a tensor-parallel shard: each rank reads and holds its own part, and the first rank assigns the slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lorikeet.proto.params import Composition
from lorikeet.shard.adapters.reader import reason_of
from lorikeet.shard.model.adapters.loading import AdapterContent, AdapterFiles
from lorikeet.shard.model.tensor_parallel.group import Group
from lorikeet.shard.ranks.commands import Clear, Compose, Forget, Put
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.scheduler.adapter_slots import Content, Device

From = TypeVar("From")
To = TypeVar("To")


@dataclass(frozen=True)
class AdapterPart:
    """The first rank's part of an adapter that every rank holds."""

    digest: str
    own: AdapterContent

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes

    @property
    def num_heads(self) -> int:
        return self.own.num_heads


class CollectiveReader:
    """Reads an adapter on all ranks together, in the reader thread of each."""

    def __init__(self, files: AdapterFiles, group: Group) -> None:
        self._files, self._group = files, group

    def read(self, path: Path) -> AdapterContent:
        """The rank's part of an adapter, once every rank has its own. Raises ValueError on every rank or on none."""
        opened = self._all(path, self._files.open, path.stem)
        return self._all(opened, self._files.lay_out, path.stem)

    def _all(self, what: From, do: Callable[[From], To], digest: str) -> To:
        """`do(what)`, once every rank has done it."""
        found, reason = None, ""
        try:
            found = do(what)
        except Exception as error:
            reason = reason_of(error, digest)
        reason = self._group.agree(reason)
        if found is None or reason:
            raise ValueError(reason)
        return found

    def read_first(self, path: Path) -> AdapterPart:
        """`read` on the first rank, which names adapters to the others by digest."""
        return AdapterPart(path.stem, self.read(path))


class BroadcastingSlots:
    """The first rank's slots, whose changes are sent to the other ranks."""

    def __init__(self, own: Device, leader: Leader) -> None:
        self._own, self._leader = own, leader

    def put(self, slot: int, content: Content) -> None:
        """Put `content` into `slot` on every rank."""
        assert isinstance(content, AdapterPart)
        self._leader.send(Put(slot, content.digest))
        self._own.put(slot, content.own)

    def is_ready(self, slot: int) -> bool:
        """On this rank; the others wait for their own copies before they compute a step."""
        return self._own.is_ready(slot)

    def clear(self, slot: int) -> None:
        """Clear `slot` on every rank."""
        self._leader.send(Clear(slot))
        self._own.clear(slot)

    def compose(self, slot: int, composition: Composition, slots: Sequence[int]) -> None:
        """Make `slot` the sum of the adapters in `slots` on every rank."""
        self._leader.send(Compose(slot, composition, tuple(slots)))
        self._own.compose(slot, composition, slots)

    def forget(self, digest: str) -> None:
        """Drop an adapter from host memory on every rank."""
        self._leader.send(Forget(digest))

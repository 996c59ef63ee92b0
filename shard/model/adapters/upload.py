"""Copies adapters to a device on a separate stream while steps run, then binds them to their slots.

shard/scheduler/adapter_slots.py assigns slots. No step uses a slot before its copy has finished, and its memory is
reused only after the steps launched until then have finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorikeet.proto.params import Composition
from lorikeet.shard.model.adapters.loading import AdapterContent, SlotParts
from lorikeet.shard.model.adapters.tables import DeviceKernels
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.scheduler.adapter_slots import Content


@dataclass
class _Placed:
    """An adapter on the device."""

    content: AdapterContent
    # [bytes] uint8 on the device
    memory: torch.Tensor
    # [bytes] uint8 on the device, of the heads
    heads: torch.Tensor | None
    copied: torch.cuda.Event | None
    is_bound: bool = False

    @property
    def is_copied(self) -> bool:
        return self.copied is None or self.copied.query()


class DeviceSlots:
    """The slots of a model on a device. Called by the thread that launches steps, on the stream that they run on."""

    def __init__(self, kernels: DeviceKernels, heads: HeadsPool, parts: SlotParts) -> None:
        self._kernels, self._parts = kernels, parts
        self._heads = heads
        self._stream = torch.cuda.Stream(kernels.device) if kernels.device.type == "cuda" else None
        self._placed: dict[int, _Placed] = {}
        self._leaving: list[_Placed] = []  # evicted during their copy: their host memory is still read

    def put(self, slot: int, content: Content) -> None:
        """Start copying `content` into `slot`."""
        assert isinstance(content, AdapterContent)
        sources = [content.memory, *([] if content.heads is None else [content.heads.memory])]
        targets = [torch.empty_like(source, device=self._kernels.device) for source in sources]
        heads = targets[1] if len(targets) > 1 else None
        self._placed[slot] = _Placed(content, targets[0], heads, self._copy(sources, targets))

    def is_ready(self, slot: int) -> bool:
        """Whether a step launched from now on may use the slot."""
        self._leaving = [placed for placed in self._leaving if not placed.is_copied]
        placed = self._placed[slot]
        if not placed.is_bound and placed.is_copied:
            assert placed.content.image is not None
            self._kernels.bind(slot, placed.content.image, placed.memory)
            self._parts.put(slot, placed.content, placed.memory)
            if placed.content.heads is not None and placed.heads is not None:
                self._heads.put(slot, placed.content.heads.on(placed.heads))
            placed.is_bound = True
        return placed.is_bound

    def compose(self, slot: int, composition: Composition, slots: Sequence[int]) -> None:
        """Make `slot` the sum of the adapters in `slots`."""
        self._kernels.compose(slot, composition, slots)

    def clear(self, slot: int) -> None:
        """Empty `slot`."""
        placed = self._placed.pop(slot)
        self._kernels.clear(slot)
        self._parts.clear(slot, placed.content)
        self._heads.clear(slot)
        if not placed.is_copied and placed.copied is not None:
            # the next use of this memory is on this stream
            torch.cuda.current_stream(self._kernels.device).wait_event(placed.copied)
            self._leaving.append(placed)

    def forget(self, digest: str) -> None:
        """No state here depends on digests."""

    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Start copying. Returns the event at its end, None where it has finished already."""
        if self._stream is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return None
        # steps already launched may still read the earlier content of this memory
        self._stream.wait_stream(torch.cuda.current_stream(self._kernels.device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

"""What attention tells the device about a step: one pinned copy, to a fixed address where a graph reads it.

Knows nothing of what it means.
"""

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.padding import Bounds
from lorikeet.shard.batch.transfer import sendable, to_device


class StepMetadata:
    """int32 numbers on a device. Steps of the same bounds find them at the same address."""

    def __init__(self) -> None:
        # [numbers that a step within the bounds has at most] int32 of each bounds
        self._fixed: dict[tuple[Bounds, torch.device], torch.Tensor] = {}

    def send(
        self, numbers: npt.NDArray[np.int32], device: torch.device, bounds: Bounds | None = None, capacity: int = 0
    ) -> torch.Tensor:
        """`numbers` on the device, without waiting for it: as many as there are, or under `bounds` the `capacity` that
        those have, of which as many are new. Raises RuntimeError if that is too little.
        """
        host = torch.from_numpy(numbers)
        if bounds is None:
            return to_device(host, device)
        memory = self._fixed.get((bounds, device))
        if memory is None:
            memory = self._fixed[bounds, device] = torch.zeros(capacity, dtype=torch.int32, device=device)
        if len(numbers) > memory.numel():
            raise RuntimeError(f"a step has {len(numbers)} numbers for attention: {memory.numel()} were reserved")
        memory[: len(numbers)].copy_(sendable(host, device), non_blocking=True)
        return memory

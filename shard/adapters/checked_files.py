"""Reads adapter files whose bytes match their checksum, and no others: a file may be damaged on its disk."""

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.adapters.loading import NICENESS, AdapterFiles, Destination, Opened, RowParallelSum
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.scheduler.adapter_slots import DAMAGED


class CheckedFiles(AdapterFiles):
    """`AdapterFiles` of a store. All bytes of a file are read before the adapter is used, in parallel with steps."""

    def __init__(
        self,
        targets: Mapping[str, Target],
        destination: Destination,
        heads: HeadsPool | None = None,
        sum_over_ranks: RowParallelSum | None = None,
    ) -> None:
        super().__init__(targets, destination, heads, sum_over_ranks)
        # a thread of its own: it holds the interpreter lock for moments only, so that it may run at low priority
        self._thread = ThreadPoolExecutor(1, "adapter checksum", _step_back)

    def open(self, path: Path) -> Opened:
        """Raises ValueError with a reason, also for a damaged file, and FileNotFoundError."""
        opened = super().open(path)
        if not self._thread.submit(opened.file.is_intact).result():
            raise ValueError(DAMAGED)
        return opened


def _step_back() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

"""Memory that is reserved at the start takes none of the machine's until it is used."""

import ctypes
import mmap
from pathlib import Path

import pytest

from lorikeet.shard.speculation.history_index import HistoryIndex
from lorikeet.shard.system.memory import mapped_zeros

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")


def num_resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_fresh_memory_is_zeros_and_takes_memory_when_it_is_written() -> None:
    before = num_resident()
    memory = mapped_zeros(64 << 20)
    assert num_resident() - before < 4 << 20
    assert memory[: 1 << 20] == bytes(1 << 20)
    memory[: 16 << 20] = b"x" * (16 << 20)
    assert num_resident() - before >= 16 << 20


def test_an_index_of_history_takes_memory_when_it_is_used() -> None:
    freed = ctypes.CDLL(None).malloc
    freed.restype, freed.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    for _ in range(3):  # from now on the C library keeps memory of such sizes, and clears it for who asks for zeros
        ctypes.CDLL(None).free(ctypes.c_void_p(freed(24 << 20)))
    before = num_resident()
    history = HistoryIndex(256 << 20)
    assert history.num_bytes > 200 << 20
    assert num_resident() - before < 8 << 20

"""Limits of open files, and memory that the C library keeps."""

import ctypes
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from lorikeet.proto.process import raise_file_limit
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(before[1], 4000) if before[1] >= 0 else 4000))
print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_becomes_the_hard_limit() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    raised, soft, hard = map(int, done.stdout.split())
    assert raised == soft == hard == min(4000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 63))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's options")
def test_a_freed_block_is_kept_for_the_next() -> None:
    code = """
import resource
from lorikeet.proto.process import keep_freed_memory
assert keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * (40 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    # the system counts a fault for each page that it gives, of which a block taken anew has thousands
    assert int(done.stdout) < 10


HEAPS = """
import sys, threading
from pathlib import Path
from lorikeet.proto.process import share_freed_memory

HEAP_BYTES = 64 << 20

def num_heaps():  # of threads: each begins at a multiple of its size
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    starts = [int(line[0].split("-")[0], 16) for line in lines if len(line) == 5 and line[1] == "rw-p"]
    return sum(start % HEAP_BYTES == 0 for start in starts)

if sys.argv[1] == "shared":
    assert share_freed_memory()
kept = []
threads = [threading.Thread(target=lambda: kept.append([b"x" * 60_000 for _ in range(50)])) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(num_heaps())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's options")
def test_threads_share_a_heap() -> None:
    def heaps(kind: str) -> int:
        return int(subprocess.run([sys.executable, "-c", HEAPS, kind], check=True, capture_output=True).stdout)

    assert heaps("own") > 0 == heaps("shared")

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

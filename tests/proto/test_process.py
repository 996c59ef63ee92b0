"""The limit of open files."""

import resource
import subprocess
import sys

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

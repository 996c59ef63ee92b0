"""The private memory of a server's processes, as Linux counts it."""

import contextlib
import re
from pathlib import Path

from benchmarks.load.servers import Server, group


def private_mb(pid: int) -> float:
    """Memory that would be free if the process were gone."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kilobytes) for kilobytes in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) * 1024 / 1e6


def child(server: Server, module: str) -> int:
    """The server's process that runs `python -m lorikeet.MODULE`."""
    (found,) = [pid for pid in group(server.process.pid) if f"\0-m\0lorikeet.{module}\0" in _words(pid)]
    return found


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""

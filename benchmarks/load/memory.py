"""How much memory processes take, as Linux counts it: each shared page in equal parts."""

import contextlib
import re
from pathlib import Path

from benchmarks.load.servers import Server, group


def proportional_mb(pid: int) -> float:
    """Resident memory of one process in millions of bytes, 0 for one that is gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024 / 1e6
    return 0.0


def group_mb(server: Server) -> float:
    """Of all processes of a server."""
    return sum(proportional_mb(pid) for pid in group(server.process.pid))


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

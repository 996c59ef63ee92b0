"""Start of the embedded model: seconds until it is ready, as a share of the imports that it needs; its memory without
adapters; and seconds until a request is answered whose shard was killed just before.

python -m benchmarks.serving.start [MODEL] prints the rounds of another model.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.evidence.figure import Case, Cases
from benchmarks.load import servers

ROUNDS = 5
MODEL = "lorikeet/base"
IMPORTS = "import torch, transformers.modeling_utils"
MIB = 1 << 20


def measure(rounds: int = ROUNDS, model: str = MODEL) -> Cases:
    """One case per start, after one that warms the file cache."""
    with servers.running("start", servers.lorikeet(model)):
        pass
    for number in range(rounds):
        import_s = _import_seconds()
        with servers.running("start", servers.lorikeet(model)) as server:
            pids = _without_readers(server.process.pid)
            raw = {
                "ready_s": round(server.ready_s, 3),
                "import_s": round(import_s, 3),
                "ready_over_imports": round(server.ready_s / import_s, 3),
                "pss_mib": round(sum(map(_pss, pids)) / MIB),
                "recovery_s": round(_recovery_seconds(server.port, pids), 3),
            }
        yield Case(f"start {number}", raw)


def _import_seconds() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.monotonic() - began


def _without_readers(leader: int) -> list[int]:
    """The processes of a server, once those that have checked its adapters have ended."""
    for _ in range(100):
        pids = servers.group(leader)
        if not any("\0lorikeet.adapters.loader.workers\0" in _command(pid) for pid in pids):
            break
        time.sleep(0.1)
    return [pid for pid in pids if _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _pss(pid: int) -> int:
    """A process's memory in bytes; what it shares with others counts in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _recovery_seconds(port: int, pids: list[int]) -> float:
    shards = [pid for pid in pids if "\0lorikeet.shard\0" in _command(pid)]
    os.kill(shards[0], signal.SIGKILL)
    began = time.monotonic()
    body = json.dumps({"inputs": "def f(", "parameters": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        response.read()
    return time.monotonic() - began


if __name__ == "__main__":
    parser = arguments.parser(__doc__)
    parser.add_argument("model", nargs="?", default=MODEL)
    for case in measure(model=parser.parse_args().model):
        print(case.name, json.dumps(case.raw), flush=True)

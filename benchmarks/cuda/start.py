"""A shard from its command to the moment when it takes requests, its model on local disk and in no cache; and what its
log says of CUDA graphs. Knows the process, its configuration and its log.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Cases, Raw
from benchmarks.cuda.setup import Setup
from benchmarks.servers import REPOSITORY, tail

TIMEOUT_S = 240.0
STOP_S = 30.0
GRAPHS = "graphs_captured"
"""The event of the shard's log, with `seconds`, `num_graphs` and `bytes`."""


def starts(setup: Setup) -> int:
    return 1 if setup.is_smoke else 2


def measure(setup: Setup, finished: frozenset[str] = frozenset()) -> Cases:
    """One case per start."""
    if all(f"start {number}" in finished for number in range(starts(setup))):
        return
    from benchmarks.cuda import checkpoint, engines  # torch

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        began = time.monotonic()
        num_bytes = checkpoint.write(folder, setup.large, setup.dtype, setup.device)
        written_s = time.monotonic() - began
        free(setup)
        for number in range(starts(setup)):
            if f"start {number}" in finished:
                continue
            checkpoint.forget(folder)
            mark, listen = folder / f"ready-{number}", f"unix:{folder}/shard-{number}.sock"
            room = {} if setup.is_cuda else engines.room(setup, setup.requests, setup.longest)
            config = engines.configured(setup, folder, **room, json_output=True, ready_file=str(mark))
            told = {**json.loads(engines.config_json(config)), "listen": listen, "parent_pid": os.getpid()}
            raw, log = _start(told, mark, folder / f"shard-{number}.log")
            raw |= {"bytes": num_bytes, "written_s": round(written_s, 1)}
            has_graphs = "graphs" in raw or not setup.is_cuda
            yield Case(f"start {number}", raw, "" if has_graphs else f"the log has no {GRAPHS!r}: {log[-500:]}")


def free(setup: Setup) -> None:
    """Give back what this process holds of the device."""
    if setup.is_cuda:
        import torch

        torch.cuda.empty_cache()


def _start(config: dict[str, Any], mark: Path, log: Path) -> tuple[dict[str, Any], str]:
    """Seconds until the mark is there, and the log's events of interest. Raises RuntimeError where it never is."""
    path = log.with_suffix(".json")
    path.write_text(json.dumps(config))
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet.shard", str(path)],
            cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        while not mark.exists():
            if process.poll() is not None or time.monotonic() - began > TIMEOUT_S:
                raise RuntimeError(f"the shard was not ready after {time.monotonic() - began:.0f} s: {tail(log)}")
            time.sleep(0.01)
        ready_s = time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")
    return {"ready_s": round(ready_s, 3), **events(text)}, text


def events(text: str) -> dict[str, Any]:
    """What a log of JSON lines says of graphs and memory."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        told = json.loads(line)
        if told.get("event") == GRAPHS:
            graphs = {key: told[key] for key in ("seconds", "num_graphs", "bytes")}
            earlier = found.get("graphs", dict.fromkeys(graphs, 0))  # target and draft model each have their own
            found["graphs"] = {key: earlier[key] + value for key, value in graphs.items()}
        if told.get("event") == "kv_memory":
            found["num_kv_tokens"] = told["num_tokens"]
    return found


def capture_s(raw: Raw) -> float:
    """Seconds of capturing all graphs; none on CPU, where there are none."""
    return float(raw["graphs"]["seconds"]) if "graphs" in raw else 0.0

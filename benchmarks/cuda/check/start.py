"""A shard from its command to the moment when it takes requests, with its model on local disk and in no cache; and what
its log says of CUDA graphs. The checkpoint is random, in safetensors files of a few gigabytes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.adapters.tiers import uncache
from benchmarks.cuda import engines
from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.kv_room import CONTEXT, GRAPHS
from benchmarks.cuda.setup import LlamaShape, Setup
from benchmarks.evidence.figure import Raw
from benchmarks.load.servers import REPOSITORY, stop, tail
from lorikeet.proto.process import environment_of_children

TIMEOUT_S = 240.0
CAPTURED = "graphs_captured"
"""The event of the shard's log, with `seconds`, `num_graphs` and `bytes`."""
FILE_BYTES = 4 << 30


def check(rows: Rows, setup: Setup, is_brief: bool) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)

        def written() -> Row:
            num_bytes = write(folder, setup.large, setup.dtype, setup.device)
            if setup.is_cuda:
                torch.cuda.empty_cache()
            return {"gigabytes": num_bytes / 1e9}

        rows.check("write a checkpoint", written, is_needed=True)
        for number in range(setup.starts):
            rows.check(f"start {number}", partial(_timed, setup, folder, number))


def _timed(setup: Setup, folder: Path, number: int) -> Row:
    drop_from_cache(folder)
    mark, listen = folder / f"ready-{number}", f"unix:{folder}/shard-{number}.sock"
    room = {} if setup.is_cuda else engines.room(setup, setup.requests, setup.longest)
    config = engines.configured(setup, folder, **room, json_output=True, ready_file=str(mark))
    given = {**asdict(config), "listen": listen, "parent_pid": os.getpid()}
    raw, log = _start(given, mark, folder / f"shard-{number}.log")
    missing = [event for event in ("graphs", "context_bytes") if event not in raw] if setup.is_cuda else []
    if missing:
        raise RuntimeError(f"the log does not say {', '.join(missing)}: {log[-300:]}")
    return {
        "ready_s": raw["ready_s"], "capture_s": capture_s(raw), "graphs_over_declared": graphs_over_declared(raw),
        "context_over_declared": context_over_declared(raw),
    }  # fmt: skip


def _start(config: dict[str, Any], mark: Path, log: Path) -> tuple[dict[str, Any], str]:
    """Seconds until the mark is there, and the log's events of interest. Raises RuntimeError where it never is."""
    path = log.with_suffix(".json")
    path.write_text(json.dumps(config))
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet.shard", str(path)],
            cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment_of_children(os.environ), start_new_session=True,
        )  # fmt: skip
    try:
        while not mark.exists():
            if process.poll() is not None or time.monotonic() - began > TIMEOUT_S:
                raise RuntimeError(f"the shard was not ready after {time.monotonic() - began:.0f} s: {tail(log)}")
            time.sleep(0.01)
        ready_s = time.monotonic() - began
    finally:
        stop(process)
    text = log.read_text(errors="replace")
    return {"ready_s": round(ready_s, 3), **events(text)}, text


def events(text: str) -> dict[str, Any]:
    """What a log of JSON lines says of graphs and memory."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        result = json.loads(line)
        if result.get("event") == CAPTURED:
            graphs = {key: result[key] for key in ("seconds", "num_graphs", "bytes")}
            earlier = found.get("graphs", dict.fromkeys(graphs, 0))  # target and draft model each have their own
            found["graphs"] = {key: earlier[key] + value for key, value in graphs.items()}
        if result.get("event") == "kv_memory":
            found["num_kv_tokens"] = result["num_tokens"]
        if result.get("event") == "device_memory":
            found["context_bytes"] = result["other_bytes"]
    return found


def capture_s(raw: Raw) -> float:
    """Seconds of capturing all graphs; none on CPU, where there are none."""
    return float(raw["graphs"]["seconds"]) if "graphs" in raw else 0.0


def graphs_over_declared(raw: Raw) -> float:
    """Bytes of all graphs over those of the table of KV tokens; 0 on CPU."""
    return raw["graphs"]["bytes"] / GRAPHS[False] if "graphs" in raw else 0.0


def context_over_declared(raw: Raw) -> float:
    """Bytes of the CUDA context and of libraries over those of the table of KV tokens; 0 on CPU."""
    return raw["context_bytes"] / CONTEXT if "context_bytes" in raw else 0.0


def write(folder: Path, shape: LlamaShape, dtype: str, device: str, file_bytes: int = FILE_BYTES) -> int:
    """Write configuration and weights, drawn on `device`. Returns their bytes. Nothing stays in the file cache."""
    network: Any = engines.random_network(LlamaConfig(**shape.config()), getattr(torch, dtype), device, seed=0)
    network.save_pretrained(folder, max_shard_size=file_bytes)
    drop_from_cache(folder)
    return sum(parameter.nbytes for parameter in network.parameters())


def drop_from_cache(folder: Path) -> None:
    """Let the file cache drop what it has of a folder's weights, so that they come from disk."""
    for path in folder.glob("*.safetensors"):
        uncache(path)

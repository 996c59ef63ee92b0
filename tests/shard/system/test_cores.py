"""Threads that compute are pinned to one core each, checked in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
REPOSITORY = Path(__file__).parents[3]
PROGRAM = """
import json, os, sys, threading
import torch
from lorikeet.shard.system import cores

torch.set_num_threads(int(sys.argv[1]))
ready, end = threading.Event(), threading.Event()
before = threading.Thread(target=lambda: (ready.set(), end.wait()), daemon=True)
before.start()
ready.wait()
pinned = cores.pin_threads()
torch.randn(512, 512) @ torch.randn(512, 512)
found = {tid: sorted(os.sched_getaffinity(int(tid))) for tid in os.listdir("/proc/self/task")}
print(json.dumps({"pinned": pinned, "main": found.pop(str(os.getpid())), "earlier": found.pop(str(before.native_id)),
                  "others": list(found.values())}))
end.set()
"""


def run(threads: int) -> dict[str, object]:
    command = [sys.executable, "-c", PROGRAM, str(threads)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=120)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
def test_as_many_threads_as_cores_are_pinned() -> None:
    found = run(NUM_CORES)
    everywhere = sorted(os.sched_getaffinity(0))
    team = [found["main"], *[cores for cores in found["others"] if len(cores) == 1]]  # type: ignore[attr-defined]
    assert found["pinned"]
    assert sorted(core for cores in team for core in cores) == everywhere
    assert found["earlier"] == everywhere, "a thread that existed before is not pinned"


@pytest.mark.long
@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
def test_fewer_threads_than_cores_are_not_pinned() -> None:
    found = run(NUM_CORES - 1)
    assert not found["pinned"]
    assert found["main"] == sorted(os.sched_getaffinity(0))

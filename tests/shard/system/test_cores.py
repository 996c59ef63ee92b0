"""Threads that compute stay on a core each: in a process of its own, whose main thread and team are looked at."""

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
kept = cores.keep()
torch.randn(512, 512) @ torch.randn(512, 512)
told = {tid: sorted(os.sched_getaffinity(int(tid))) for tid in os.listdir("/proc/self/task")}
print(json.dumps({"kept": kept, "main": told.pop(str(os.getpid())), "earlier": told.pop(str(before.native_id)),
                  "others": list(told.values())}))
end.set()
"""


def run(threads: int) -> dict[str, object]:
    command = [sys.executable, "-c", PROGRAM, str(threads)]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=120)
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
def test_as_many_threads_as_cores_stay_on_one_each() -> None:
    told = run(NUM_CORES)
    everywhere = sorted(os.sched_getaffinity(0))
    team = [told["main"], *[cores for cores in told["others"] if len(cores) == 1]]  # type: ignore[attr-defined]
    assert told["kept"]
    assert sorted(core for cores in team for core in cores) == everywhere
    assert told["earlier"] == everywhere, "a thread that was there before goes where it likes"


@pytest.mark.skipif(NUM_CORES < 2, reason="needs two cores")
def test_fewer_threads_than_cores_go_where_they_like() -> None:
    told = run(NUM_CORES - 1)
    assert not told["kept"]
    assert told["main"] == sorted(os.sched_getaffinity(0))

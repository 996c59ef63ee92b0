"""A canary: the requests of an ordinary user next to attackers, how long each took, and the memory of the server's
processes meanwhile.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.attacks.attackers import local
from tests.e2e.launched import ROOT, Launched

SECONDS, QUICK_SECONDS = float(os.environ.get("ATTACK_SECONDS", "60")), 2.0
MIN_CANARIES, QUICK_CANARIES = 100, 5
MAX_SECONDS = 10.0
"""Time of any of the canary's requests next to a small attack. Before callers had shares, some took minutes."""
LATER_MB, LATER_S = 60.0, 60.0
"""Memory of each process above idle, at most so many seconds after an attack."""
BODY = {"inputs": "def add(a, b):", "parameters": {"max_new_tokens": 4}}
WAIT_S = 60.0


@dataclass
class Canary:
    """What an ordinary user saw."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """Seconds of requests for adapters that were never loaded: what reads them has the lowest priority of all."""
    num_cut: int = 0
    """Requests whose connection ended, where that is expected."""

    def quantile_ms(self, percent: int) -> float:
        return 1000 * statistics.quantiles(self.seconds, n=100)[percent - 1]


def canary(
    url: str,
    is_over: Callable[[int], bool],
    adapters: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    *,
    is_cut: bool = False,
) -> Canary:
    """One request after another until `is_over` says so of their number; every fifth for one of the adapters. With
    `is_cut`, connections may end.
    """
    seen, expected, left = Canary(), "", list(adapters)
    with httpx.Client(base_url=url, timeout=WAIT_S, headers=headers) as client:
        while not is_over(len(seen.seconds)):
            began = time.monotonic()
            name = left.pop(0) if left and len(seen.seconds) >= 5 * len(seen.loads) else ""
            try:
                body = {"inputs": "def add(a, b):", "parameters": local(name)} if name else BODY
                response = client.post("/generate", json=body)
                text = response.json().get("generated_text", "")
                expected = expected or ("" if name else text)
                if response.status_code != 200 or (text != expected and not name):
                    seen.failures.append(f"{response.status_code} {response.text[:200]}")
            except httpx.TransportError as error:
                if is_cut:
                    seen.num_cut += 1
                    time.sleep(0.05)
                    continue
                seen.failures.append(repr(error))
            (seen.loads if name else seen.seconds).append(time.monotonic() - began)
    return seen


@dataclass
class Attacked:
    """A canary next to an attack, and what the attackers got."""

    canary: Canary
    num_attacks: int
    statuses: dict[int, int]
    """Answers by status."""
    wrong: list[str]
    """Answers that no attacker may get."""


def next_to(
    launched: Launched,
    name: str,
    seconds: float,
    at_least: int,
    *,
    peer: str = "",
    adapters: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> Attacked:
    """A canary next to an attack, or to what `peer` names."""
    attackers = [sys.executable, "-m", "tests.attacks.attackers", str(launched.port), name, str(seconds), peer]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["nice", "-n", "19", *attackers], cwd=ROOT, env=environment, **pipes) as process:
        time.sleep(1.0)
        end = time.monotonic() + seconds
        seen = canary(launched.url, lambda num: time.monotonic() >= end and num >= at_least, adapters, headers)
        output, _ = process.communicate(timeout=180)  # which ends their input
    assert process.returncode == 0
    printed = json.loads(output)
    return Attacked(seen, printed["attacks"], {int(s): n for s, n in printed["statuses"].items()}, printed["wrong"])


class Memory(threading.Thread):
    """The largest memory of each process above idle, in MB, measured until `end`."""

    def __init__(self, launched: Launched) -> None:
        super().__init__(daemon=True)
        self._launched = launched
        self._idle = resident_mb(launched)
        self._ended = threading.Event()
        self.peak = dict.fromkeys(self._idle, 0.0)
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self.peak = {name: max(self.peak[name], mb) for name, mb in self.now().items()}

    def now(self) -> dict[str, float]:
        return {name: mb - self._idle[name] for name, mb in resident_mb(self._launched).items()}

    def end(self) -> None:
        self._ended.set()
        self.join()

    def later(self) -> dict[str, float]:
        """Once each is near idle again, or LATER_S later."""
        end = time.monotonic() + LATER_S
        while max((now := self.now()).values()) > LATER_MB and time.monotonic() < end:
            time.sleep(1.0)
        return now


def resident_mb(launched: Launched) -> dict[str, float]:
    """Memory of the router, the shard, and the loader with what reads adapters; each with all that it has started."""
    router, shard = launched.child("router"), launched.shard(0)
    others = [pid for pid in launched.all_children() if pid not in (router, shard)]
    loader = sum(map(_shared_mb, others)) + sum(map(_children_mb, others))
    return {
        "router": _own_mb(router) + _children_mb(router),
        "shard": _own_mb(shard) + _children_mb(shard),
        "loader": loader,
    }


def _own_mb(pid: int) -> float:
    """With all pages that it shares with others: it does not grow when one of these ends."""
    return _mb(pid, "Rss")


def _shared_mb(pid: int) -> float:
    """With a part of the pages that it shares with others, so that those of forked processes count once in all."""
    return _mb(pid, "Pss")


def _mb(pid: int, name: str) -> float:
    """0 for a process that has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    size = rollup.partition(f"\n{name}:")[2].split()
    return int(size[0]) * 1024 / 1e6 if size else 0.0


def _children_mb(pid: int) -> float:
    """All processes that it has started, and theirs."""
    total = 0.0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
            total += sum(_shared_mb(child) + _children_mb(child) for child in children)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return total

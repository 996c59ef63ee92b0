"""Eight attackers never get in the way of another user: a canary next to each attack is answered, as fast as next to
harmless clients, and the router's memory stays bounded.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attacks.attackers import ATTACKS, HUB_PORT, NUM_ATTACKERS, NUM_CANARIES, SHARD, local, write_adapters
from tests.e2e.launched import ROOT, Launched, command, free_port

SECONDS, QUICK_SECONDS = float(os.environ.get("ATTACK_SECONDS", "60")), 3.0
REST_S = SECONDS / 5
"""After an attack, until the memory that it left is measured: sooner than the minute of the bar."""
MIN_CANARIES = 100
MAX_SECONDS = 10.0
"""Time of any of the canary's requests next to a small attack. Before callers had shares, some took minutes."""
MAX_SLOWDOWN = 3.0
"""Maximum slowdown of the canary's p99, against the same clients doing something harmless."""
STORE = "64MiB"
"""The adapter cache, so small that merges of attackers fill it."""
PEAK_MB, LATER_MB = 400.0, 60.0
"""Memory of router and helpers above idle: at most, and a minute after the attack."""
BODY = {"inputs": "def add(a, b):", "parameters": {"max_new_tokens": 4}}


@dataclass
class Canary:
    """What an ordinary user saw."""

    seconds: list[float]
    failures: list[str]
    loads: list[float] = field(default_factory=list)
    """Seconds of requests for adapters that were never loaded: what reads them has the lowest priority of all."""

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[98]


def canary(url: str, seconds: float, at_least: int, adapters: Sequence[str] = ()) -> Canary:
    """One request after another for so long, and at least so many; every fifth for one of the adapters."""
    seen, end, expected, left = Canary([], []), time.monotonic() + seconds, "", list(adapters)
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < end or len(seen.seconds) < at_least:
            began = time.monotonic()
            name = left.pop(0) if left and len(seen.seconds) >= 5 * len(seen.loads) else ""
            try:
                body = {"inputs": "def add(a, b):", "parameters": local(name)} if name else BODY
                response = client.post("/generate", json=body)
                text = response.json().get("generated_text", "")
                expected = expected or ("" if name else text)
                if response.status_code != 200 or (text != expected and not name):
                    seen.failures.append(f"{response.status_code} {response.text[:200]}")
            except httpx.HTTPError as error:
                seen.failures.append(repr(error))
            (seen.loads if name else seen.seconds).append(time.monotonic() - began)
    return seen


class Memory(threading.Thread):
    """The largest memory of processes and their children, measured until `end`."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._ended = threading.Event()
        self.peak_mb = 0.0
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self.peak_mb = max(self.peak_mb, resident_mb(self._pids))

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.peak_mb


def resident_mb(pids: list[int]) -> float:
    """Memory of processes and of all that they have started, where pages that forked processes share count once.
    Processes may end meanwhile.
    """
    total, left = 0.0, list(pids)
    while left:
        pid = left.pop()
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            for thread in os.listdir(f"/proc/{pid}/task"):
                left += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue
        total += int(rollup.partition("\nPss:")[2].split()[0]) * 1024 / 1e6
    return total


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    roots = tmp_path_factory.mktemp("roots")
    write_adapters(roots)
    port = str(free_port())
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_CACHE": str(roots.parent / "hub")}
    store = ("--adapter-disk-cache", STORE, "--adapter-store", str(roots.parent / "store"))
    flags = ("--cpu-memory", "256MiB", "--threads", "1", "--local-adapter-root", str(roots), *store)
    with Launched(*flags, **hub) as launched, pytest.MonkeyPatch.context() as patch:
        launched.wait_until_ready()
        config = Path(command(launched.shard(0)).rstrip("\0").rpartition("\0")[2])
        patch.setenv(HUB_PORT, port)
        patch.setenv(SHARD, json.loads(config.read_text())["listen"])
        yield launched


def next_to(launched: Launched, name: str, seconds: float, at_least: int, peer: str = "") -> tuple[Canary, int]:
    """A canary next to an attack, or to what `peer` names; and how often the attackers acted."""
    command = [
        "nice",
        "-n",
        "19",
        sys.executable,
        "-m",
        "tests.attacks.attackers",
        str(launched.port),
        name,
        str(seconds),
        peer,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as attackers:
        time.sleep(1.0)
        prefix = f"canary-{'peer-' * bool(peer)}{name}"
        adapters = [f"{prefix}-{number}" for number in range(NUM_CANARIES)] if ATTACKS[name].loads else []
        seen = canary(launched.url, seconds - 1.0, at_least, adapters)
        output, _ = attackers.communicate(timeout=180)  # which ends their input
    assert attackers.returncode == 0
    return seen, int(output)


@pytest.fixture(scope="module")
def harmless(launched: Launched) -> Callable[[str], Canary]:
    """What the canary saw next to harmless clients, once for each kind."""
    return functools.cache(lambda peer: next_to(launched, "bombs", SECONDS, MIN_CANARIES, peer)[0])


def measure(launched: Launched, name: str, harmless: Canary) -> str:
    """A canary next to the attack; the bars that are not met, "" for none."""
    pids = [launched.child("router"), launched.child("adapters")]
    idle_mb = resident_mb(pids)
    memory = Memory(pids)
    seen, num_attacks = next_to(launched, name, SECONDS, MIN_CANARIES)
    peak_mb = memory.end() - idle_mb
    time.sleep(REST_S)
    later_mb = resident_mb(pids) - idle_mb
    slowdown = seen.p99 / harmless.p99
    print(
        f"{name}: {num_attacks} attacks, {len(seen.seconds)} canary requests, {len(seen.failures)} failed, "
        f"p99 {1000 * seen.p99:.0f} ms = {slowdown:.2f} x {ATTACKS[name].peer}, max {max(seen.seconds):.2f} s, "
        f"loads max {max(seen.loads, default=0.0):.2f} s, "
        f"memory +{peak_mb:.0f} MB, later +{later_mb:.0f} MB",
        file=sys.stderr,
    )
    bars = {
        f"{len(harmless.failures)} failed next to harmless clients": not harmless.failures,
        f"{len(seen.failures)} failed: {seen.failures[:3]}": not seen.failures,
        f"p99 {slowdown:.2f} x": slowdown <= MAX_SLOWDOWN,
        f"{peak_mb:.0f} MB above idle": peak_mb <= PEAK_MB,
        f"{later_mb:.0f} MB above idle later": later_mb <= LATER_MB,
    }
    return "; ".join(text for text, is_met in bars.items() if not is_met)


MAIN = (
    *("unread-alternatives", "resumable", "many-choices", "many-connections", "ambiguous-grammar", "echo", "bombs"),
    *("large-listing", "health-generate", "small-chunks", "second-router", "unknown-adapters", "merges"),
)
"""Attacks of which `make test` has a few seconds, and which are measured at full size."""


@pytest.mark.long
@pytest.mark.parametrize("name", [*MAIN, "all"])
def test_a_canary_next_to_each_attack(launched: Launched, name: str, harmless: Callable[[str], Canary]) -> None:
    assert not measure(launched, name, harmless(ATTACKS[name].peer))


@pytest.mark.parametrize("name", MAIN)
def test_a_canary_is_answered_next_to_a_small_attack(launched: Launched, name: str) -> None:
    """Without the bars of time, which depend on what else the machine does, but for the longest wait."""
    pids = [launched.child("router")]
    idle_mb = resident_mb(pids)
    seen, num_attacks = next_to(launched, name, QUICK_SECONDS, 5)
    assert num_attacks
    assert not seen.failures
    assert max(seen.seconds) < MAX_SECONDS, seen.seconds
    assert resident_mb(pids) - idle_mb < PEAK_MB


@pytest.mark.long
@pytest.mark.parametrize("name", ATTACKS)
def test_attackers_act_and_the_canary_is_answered(launched: Launched, name: str) -> None:
    """The generators in seconds, without the bars of time and memory."""
    seen, num_attacks = next_to(launched, name, QUICK_SECONDS, 5)
    assert num_attacks >= NUM_ATTACKERS
    assert not seen.failures

"""Eight attackers never get in the way of another user: a canary next to each attack is answered, as fast as next to
harmless clients, and the memory of the server's processes stays bounded. No attacker gets what it should not.
"""

import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.attacks.attackers import ALL, ATTACKS, HUB_PORT, NUM_ATTACKERS, SHARD
from tests.attacks.canary import (
    MAX_SECONDS,
    MIN_CANARIES,
    QUICK_CANARIES,
    QUICK_SECONDS,
    SECONDS,
    Attacked,
    Canary,
    canary,
    next_to,
    resident_mb,
)
from tests.attacks.hostile_adapters import NUM_CANARIES, write_adapters
from tests.attacks.report import LIMITS_MB, Report
from tests.e2e.launched import Launched, command, free_port

STORE = "64MiB"
"""The adapter cache, so small that merges of attackers fill it."""
LOADING = [*(name for name, attack in ATTACKS.items() if attack.loads), ALL]
"""Attacks next to which the canary asks for adapters that were never loaded, too."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("attacked")
    write_adapters(folder / "roots", [f"{name}-{peer}" for name in LOADING for peer in ("attacked", "harmless")])
    (folder / "outside").mkdir()
    port = str(free_port())
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_CACHE": str(folder / "hub")}
    store = ("--adapter-disk-cache", STORE, "--adapter-store", str(folder / "store"))
    flags = ("--cpu-memory", "256MiB", "--threads", "1", "--local-adapter-root", str(folder / "roots"), *store)
    with Launched(*flags, port=free_port(), **hub) as launched, pytest.MonkeyPatch.context() as patch:
        launched.wait_until_ready()
        config = Path(command(launched.shard(0)).rstrip("\0").rpartition("\0")[2])
        patch.setenv(HUB_PORT, port)
        patch.setenv(SHARD, json.loads(config.read_text())["listen"])
        yield launched
    assert not list((folder / "outside").iterdir()), "a hub wrote outside of its cache"
    assert {path.name for path in folder.iterdir()} <= {"roots", "outside", "hub", "store"}


def attacked(launched: Launched, name: str, seconds: float, at_least: int, peer: str = "") -> Attacked:
    prefix = f"canary-{name}-{'harmless' if peer else 'attacked'}"
    adapters = [f"{prefix}-{number}" for number in range(NUM_CANARIES)] if name in LOADING else []
    return next_to(launched, name, seconds, at_least, peer=peer, adapters=adapters)


@pytest.fixture(scope="module")
def used(launched: Launched) -> Launched:
    """The server once all of its KV pages were used: their memory stays, as the operator has chosen."""

    def pages(name: str) -> float:
        text = httpx.get(f"{launched.url}/metrics").text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")))

    draw = random.Random(0)
    while pages("lorikeet_kv_pages_cached") < 0.97 * pages("lorikeet_kv_pages"):
        prompts = [[draw.randrange(100, 4000) for _ in range(2000)] for _ in range(4)]
        body = {"model": "", "prompt": prompts, "max_tokens": 1}
        httpx.post(f"{launched.url}/v1/completions", json=body, timeout=60).raise_for_status()
    return launched


@pytest.fixture(scope="module")
def harmless(used: Launched) -> Callable[[str], Canary]:
    """What the canary saw next to harmless clients as those of an attack, once for each kind."""

    @functools.cache
    def next_to_peers(name: str, peer: str) -> Canary:
        return attacked(used, name, SECONDS, MIN_CANARIES, peer).canary

    return lambda name: next_to_peers(ALL, "users") if name == ALL else next_to_peers("bombs", ATTACKS[name].peer)


MAIN = (
    *("unread-alternatives", "resumable", "many-choices", "many-connections", "ambiguous-grammar", "echo", "bombs"),
    *("large-listing", "health-generate", "small-chunks", "second-router", "unknown-adapters", "merges"),
    *("web-pages", "wrong-hub", "wrong-numbers"),
)
"""Attacks of which `make test` has a few seconds, and which are measured at full size."""


@pytest.mark.long
def test_a_canary_next_to_nobody(launched: Launched, report: Report) -> None:
    end = time.monotonic() + SECONDS / 4
    seen = canary(launched.url, lambda num: time.monotonic() >= end and num >= MIN_CANARIES)
    report.add("idle", 0, seen)
    assert not seen.failures


@pytest.mark.long
@pytest.mark.parametrize("name", [*MAIN, ALL])
def test_a_canary_next_to_each_attack(
    launched: Launched, name: str, harmless: Callable[[str], Canary], report: Report
) -> None:
    peers = harmless(name)
    assert not report.measure(launched, name, lambda: attacked(launched, name, SECONDS, MIN_CANARIES), peers)


@pytest.mark.parametrize("name", [*MAIN, ALL])
def test_a_canary_is_answered_next_to_a_small_attack(launched: Launched, name: str) -> None:
    """Without the bars of time, which depend on what else the machine does, but for the longest wait."""
    idle_mb = resident_mb(launched)["router"]
    seen = attacked(launched, name, QUICK_SECONDS, QUICK_CANARIES)
    assert seen.num_attacks and not seen.wrong
    assert not seen.canary.failures
    assert max(seen.canary.seconds) < MAX_SECONDS, seen.canary.seconds
    assert resident_mb(launched)["router"] - idle_mb < LIMITS_MB["router"]


@pytest.mark.long
@pytest.mark.parametrize("name", [*ATTACKS, ALL])
def test_attackers_act_and_the_canary_is_answered(launched: Launched, name: str) -> None:
    """The generators in seconds, without the bars of time and memory."""
    seen = attacked(launched, name, QUICK_SECONDS, QUICK_CANARIES)
    assert seen.num_attacks >= NUM_ATTACKERS and not seen.wrong
    assert not seen.canary.failures

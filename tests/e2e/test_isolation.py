"""Isolated API keys share no prefix cache: neither counts, nor the choice of a shard, nor latency show whether another
key has sent the same prompt.
"""

import json
import os
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import KEYS, Replicas
from tests.e2e.launched import Launched

NUM_WORDS = 400
"""Words of a prompt: many pages, and a measurable time."""
ALONE, OTHER, SHARING = KEYS
"""Keys: the first two are isolated."""
PAIRS: list[tuple[str | None, str | None, bool]] = [
    (None, SHARING, True),
    (ALONE, OTHER, False),
    (None, ALONE, False),
    (None, None, True),
    (SHARING, None, True),
    (ALONE, ALONE, True),
    (ALONE, SHARING, False),
    (ALONE, None, False),
    (SHARING, OTHER, False),
]
"""Keys of two equal prompts, and whether the second finds the first one's prefix."""


@dataclass
class Scene:
    launched: Launched
    usage: Path

    def ask(self, prompt: str, key: str | None = None) -> int:
        """The tokens of the prompt that were found in a cache."""
        headers = {} if key is None else {"authorization": f"Bearer secret {key}"}
        body = {"model": "", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{self.launched.url}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] > NUM_WORDS
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def counted(self, name: str) -> float:
        """Value of a metric, with its labels."""
        lines = httpx.get(f"{self.launched.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))

    def records(self, number: int) -> list[dict[str, Any]]:
        """The last lines about requests, once all are there."""
        end = time.monotonic() + 30
        num_asked = self.counted("lorax_request_count")
        while len(lines := self.usage.read_text().splitlines()) < num_asked:
            assert time.monotonic() < end
            time.sleep(0.01)
        return [json.loads(line) for line in lines[-number:]]


@pytest.fixture
def scene(replicas: Replicas) -> Scene:
    return Scene(replicas.launched, replicas.usage)


def prompt(name: str) -> str:
    """Another one for every name, from its first word on."""
    return " ".join(f"{name}{number % 7}" for number in range(NUM_WORDS))[: 4 * NUM_WORDS]


@pytest.mark.parametrize(
    "pairs", [pytest.param(PAIRS[:3], id="some"), pytest.param(PAIRS[3:], id="others", marks=pytest.mark.long)]
)
def test_only_sharing_keys_hit_each_other_s_prefixes(
    scene: Scene, pairs: list[tuple[str | None, str | None, bool]]
) -> None:
    for first, second, is_shared in pairs:
        asked = prompt(f"{first}{second}")
        assert scene.ask(asked, first) == 0
        cached, hits = scene.counted("lorikeet_cached_prompt_tokens_total"), scene.counted("lorikeet_prefix_hits_total")
        placed = scene.counted('lorikeet_routing_decisions_total{reason="prefix_cached"}')
        num_found = scene.ask(asked, second)
        assert (num_found > NUM_WORDS) == is_shared, (first, second, num_found)
        assert num_found == 0 or is_shared
        assert scene.counted("lorikeet_cached_prompt_tokens_total") == cached + num_found
        assert scene.counted("lorikeet_prefix_hits_total") == hits + is_shared
        assert scene.counted('lorikeet_routing_decisions_total{reason="prefix_cached"}') == placed + is_shared
        before, after = scene.records(2)
        assert (before["key"], after["key"]) == (first, second)
        assert (before["cached_tokens"], after["cached_tokens"]) == (0, num_found)


@pytest.mark.long
def test_time_to_first_token_is_independent_of_other_keys(scene: Scene) -> None:
    """A prompt of another key takes as long as a new one, whereas a key's own prompt is fast."""
    seconds: dict[str, list[float]] = {"new": [], "another's": [], "own": []}
    for turn in range(5):
        asked = prompt(f"t{turn}")
        for kind, key in (("new", ALONE), ("another's", OTHER), ("own", OTHER)):
            scene.ask(asked, key)
            (line,) = scene.records(1)
            seconds[kind].append(line["first_token_seconds"])
    new, another_s, own = (statistics.median(seconds[kind]) for kind in ("new", "another's", "own"))
    assert own < new / 2, seconds
    assert new / 2 < another_s < new * 2, seconds


def test_a_moved_usage_log_is_reopened_at_sighup(scene: Scene) -> None:
    scene.ask(prompt("before"))
    scene.records(1)
    moved = scene.usage.with_suffix(".1")
    num_before = len(scene.usage.read_text().splitlines())
    os.rename(scene.usage, moved)
    scene.launched.signal(signal.SIGHUP)
    end = time.monotonic() + 30
    while not scene.usage.exists():
        assert time.monotonic() < end, scene.launched.output
        time.sleep(0.01)
    scene.ask(prompt("after"))
    while not scene.usage.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.01)
    (line,) = scene.usage.read_text().splitlines()
    assert json.loads(line)["status"] == 200
    assert len(moved.read_text().splitlines()) == num_before


def test_an_idle_server_counts_nothing(scene: Scene) -> None:
    """Heartbeats of shards are no steps, and scrapes no requests."""
    scene.ask(prompt("idle"))
    time.sleep(0.3)  # the last heartbeat of the busy time
    before = counters(scene)
    time.sleep(1.0)
    after = counters(scene)
    assert {name: value for name, value in after.items() if value != before[name]} == {}


def counters(scene: Scene) -> dict[str, float]:
    """All counters and histograms of the server."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{scene.launched.url}/metrics").text):
        if family.type != "gauge":
            found.update({f"{each.name}{sorted(each.labels.items())}": each.value for each in family.samples})
    return found

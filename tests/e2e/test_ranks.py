"""Tensor parallelism over two processes: the same answers as one process, and no process is left."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
from transformers import AutoTokenizer

from lorikeet.launcher import Client
from lorikeet.launcher.exits import Exit
from tests import tiny
from tests.adapters.making import make_adapter
from tests.e2e.launched import Launched, alive

NUM_TOKENS = 40
INVOCATION = "<check>"
PROMPTS = ("the quick brown fox", "def main() -> None:", f"the quick brown fox{INVOCATION} jumps")
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]},
    "dora": {"r": 4, "use_dora": True, "target_modules": ["v_proj", "o_proj", "gate_proj", "down_proj"]},
    "whole": {"r": 16, "target_modules": ["k_proj", "lm_head", "embed_tokens", "down_proj"], "bias": "lora_only"},
    "activated": {"r": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
}
DISTRIBUTIONS: tuple[dict[str, Any], ...] = (
    {"return_k_alternatives": 2},
    {"do_sample": True, "seed": 5, "temperature": 0.8},
    {"speculative_tokens": 4, "speculative_method": "lookup", "speculative_schedule": "constant"},
    {"speculative_tokens": 2, "speculative_method": "draft", "do_sample": True, "seed": 8, "temperature": 1.5},
)
ASKED = [
    (prompt, name, distribution) for prompt in PROMPTS for name in (None, *CONFIGS) for distribution in DISTRIBUTIONS
]


def answers(server: Launched) -> list[list[int]]:
    """Token ids of all requests, asked at once."""

    def ask(case: tuple[str, str | None, dict[str, Any]]) -> list[int]:
        prompt, name, distribution = case
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True, "ignore_eos_token": True, "adapter_id": name}
        body = {"inputs": prompt, "parameters": parameters | distribution}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return list(pool.map(ask, ASKED))


def ranks(server: Launched) -> list[int]:
    """The shard's processes except the first."""
    shard = server.shard(0)
    text = Path(f"/proc/{shard}/task/{shard}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ranks")
    base = tiny.make("llama", folder / "base", tokenizer=True, max_position_embeddings=4096)
    invocation = AutoTokenizer.from_pretrained(base)(INVOCATION, add_special_tokens=False)["input_ids"]
    for seed, (name, config) in enumerate(CONFIGS.items()):
        ids = invocation if name == "activated" else None
        settings = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=ids, **config)
        make_adapter(base, folder / "roots" / name, settings, seed=seed)
    draft = tiny.make(
        "llama", folder / "draft", tokenizer=True, seed=9, num_hidden_layers=1, max_position_embeddings=4096
    )
    found = [
        "--draft-model-id",
        str(draft),
        "--model-id",
        str(base),
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--adapter-source",
        "local",
    ]
    found += ["--local-adapter-root", str(folder / "roots"), "--adapter-store", str(folder / "store")]
    return [*found, "--cpu-memory", "256MiB", "--speculative-tokens", "4"]


@pytest.fixture(scope="module")
def split(arguments: list[str]) -> Iterator[Launched]:
    with Launched(*arguments, "--num-shard", "2") as launched:
        launched.wait_until_ready()
        yield launched
        others = ranks(launched)
        launched.signal(signal.SIGTERM)
        assert launched.wait() == Exit.OK
        assert not any(map(alive, others))


@pytest.fixture(scope="module")
def whole(arguments: list[str]) -> list[list[int]]:
    with Launched(*arguments) as launched:
        return answers(launched.wait_until_ready())


@pytest.mark.long
def test_every_request_gets_what_the_whole_model_gives(split: Launched, whole: list[list[int]]) -> None:
    assert answers(split) == whole
    given = dict(zip([(prompt, name, str(distribution)) for prompt, name, distribution in ASKED], whole, strict=True))
    changed = [
        ids != given[prompt, None, distribution]
        for (prompt, name, distribution), ids in given.items()
        if name is not None and (name != "activated" or INVOCATION in prompt)
    ]
    assert sum(changed) >= 0.9 * len(changed), "adapters that change nothing prove nothing"
    assert len(ranks(split)) == 1


@pytest.mark.device
def test_a_killed_rank_restarts_its_shard_and_fails_no_request(split: Launched, whole: list[list[int]]) -> None:
    (other,) = ranks(split)
    shard, client = split.shard(0), Client(split.url)

    def end_it() -> float:
        time.sleep(0.3)
        os.kill(other, signal.SIGKILL)
        return time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(end_it)
        long = pool.submit(client.generate, PROMPTS[0], max_new_tokens=3000, ignore_eos_token=True)
        killed_at = ended.result()
        while alive(shard):
            assert time.monotonic() < killed_at + 10
            time.sleep(0.02)
        assert long.result().details["generated_tokens"] == 3000
    reasons = ("rank_ended", "a rank of this shard", "a step failed on one of several ranks")
    assert any(reason in line for line in split.lines for reason in reasons)
    assert answers(split) == whole
    assert split.shard(0) != shard and len(ranks(split)) == 1

"""`lorikeet-heads train --url` with a real server: the server's texts are those that the tool generates itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest

from tests.adapters.making import make_adapter
from tests.e2e import tiny_server_model
from tests.e2e.launched import ROOT, Launched

PROMPTS = ["one two three", "the quick brown fox", "four", "a b c d", "hello there", "once upon a time"]


def train(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the tool; returns its last line and, under `texts`, the generated texts."""
    given = ("--model-id", str(folder / "model"), "--device", "cpu", "--max-new-tokens", "16", "--epochs", "2")
    work = folder / f"work{len(list(folder.iterdir()))}"
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "lorikeet.adapters.medusa.cli",
            "train",
            *given,
            "--work",
            work,
            "--out",
            folder / "out",
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = (work / "texts.jsonl").read_text().splitlines()[1:]
    return {**json.loads(ended.stdout.splitlines()[-1]), "texts": dict(map(json.loads, lines))}


@pytest.mark.long
def test_a_running_server_generates_the_texts(tmp_path: Path) -> None:
    model = tiny_server_model.make(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    prompts = ("--prompts", str(tmp_path / "prompts.txt"))
    alone = train(tmp_path, *prompts)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    adapter = ("--adapter-id", str(make_adapter(model, tmp_path / "adapter", config)))
    adapted = train(tmp_path, *prompts, *adapter)
    flags = ("--cpu-memory", "64MiB", "--threads", "1", "--dtype", "float32", "--local-adapter-root", str(tmp_path))
    with Launched("--model-id", str(model), *flags) as server:
        server.wait_until_ready()
        served = train(tmp_path, *prompts, "--url", server.url)
        made_up = train(tmp_path, "--url", server.url, "--num-own-prompts", "8")
        served_adapted = train(tmp_path, *prompts, *adapter, "--url", server.url)
    assert served["texts"] == alone["texts"]
    assert served["heads_sha256"] == alone["heads_sha256"]
    assert served_adapted["texts"] == adapted["texts"] != alone["texts"]
    assert len(made_up["texts"]) == 8
    assert made_up["greedy_agreement"] > 0.95

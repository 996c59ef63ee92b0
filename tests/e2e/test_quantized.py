"""Servers with rounded weights on CPU: their texts, with an adapter too, are those of the same arithmetic in torch."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lorikeet.launcher import Client, launch
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.kernels import integer
from tests.e2e.launched import ROOT
from tests.shard.engine.adapter_exactness import NEW_TOKENS, lay_out, through_engine
from tests.shard.model.gguf.files import answer_of, write_model

DEMO = ROOT / "demo"
PROMPTS = ("def add(a, b):\n    return a", "import os\nimport sys\n\n\ndef main():\n", "The river Mugge flows through")
CITATION = "adapters/citation"


def texts_of(server: Client) -> list[list[int]]:
    """Greedy token ids: every prompt without an adapter, and the last one with it."""
    usual: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos_token": True}
    answers = [server.generate(prompt, **usual) for prompt in PROMPTS]
    answers.append(server.generate(PROMPTS[-1], adapter_id=CITATION, **usual))
    return [[token.id for token in answer.tokens] for answer in answers]


def reference(folder: Path, store: Path, method: str | None, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The same from an engine in this process whose products of integers are torch's."""
    monkeypatch.setattr(integer, "available", lambda: False)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt).input_ids for prompt in (*PROMPTS, PROMPTS[-1])]
    digest = lay_out(folder, store, {CITATION: DEMO / CITATION})[CITATION]
    config = ShardConfig(
        "m", str(folder), "unix:/dev/null", dtype="float32", quantize=method, max_total_tokens=128,
        adapter_store=str(store), max_active_adapters=2,
    )  # fmt: skip
    return through_engine(config, prompts, [*[""] * len(PROMPTS), digest])


def served(model: Path, method: str | None) -> list[list[int]]:
    flags: dict[str, Any] = {
        "cpu_memory": "256MiB",
        "threads": 1,
        "dtype": "float32",
        "default_adapter_source": "local",
    }
    with launch(str(model), local_adapter_root=[str(DEMO)], quantize=method, **flags) as server:
        return texts_of(server)


@pytest.mark.long
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_texts_of_a_server_that_rounds(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = served(DEMO / "base", method)
    assert given == reference(DEMO / "base", tmp_path / "store", method, monkeypatch)
    assert given[-1] != given[-2], "the adapter changes nothing"


@pytest.mark.long
def test_texts_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    write_model(DEMO / "base", tmp_path / "demo.gguf", "Q8_0")
    given = served(tmp_path / "demo.gguf", None)
    assert "error" not in answer_of(tmp_path / "demo.gguf", tmp_path / "made")
    assert given == reference(tmp_path / "made", tmp_path / "store", None, monkeypatch)
    assert given[-1] != given[-2], "the adapter changes nothing"

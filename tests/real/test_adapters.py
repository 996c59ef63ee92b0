"""Adapters that PEFT trained on a real model, in one batch over each form of its weights, next to PEFT."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoTokenizer

from lorikeet.proto.params import LogprobParams
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.requests.request import Request
from tests.real import likelihood, models
from tests.shard.engine.adapter_exactness import lay_out, outputs_of
from tests.shard.engine.exactness import TIE
from tests.shard.model.gguf.files import answer_of

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),  # about merging, which nobody does here
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
]

NAME = "smollm2"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rsLoRA": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ATTENTION},
    "DoRA": {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": ATTENTION},
    "all linears": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "output head": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]},
}
"""Arguments of LoraConfig."""
NUM_TOKENS = 48
"""Tokens of the part of the text that an adapter is trained on, and judged by."""
NUM_STEPS = 6
LEARNING_RATE = 2e-3
NUM_NEW = 16
"""Tokens of each greedy text."""
LEAST_LEARNED = 1.0
"""Nats per token that training gains."""
MOST, MOST_OF_ONE = 0.02, 0.05
"""Nats per token between PEFT and what is served, on average over all parts and over one."""


@cache
def parts() -> dict[str, list[int]]:
    """What each adapter is trained on; that of the bare base has the name ""."""
    tokenizer: Any = AutoTokenizer.from_pretrained(models.folder(NAME, "float32"))
    ids = tokenizer(likelihood.TEXT.read_text()).input_ids
    return {name: ids[index * NUM_TOKENS : (index + 1) * NUM_TOKENS] for index, name in enumerate(("", *ADAPTERS))}


@cache
def trained() -> dict[str, Path]:
    """The adapters' folders, by name."""

    def make(path: Path) -> None:
        for name, arguments in ADAPTERS.items():
            torch.manual_seed(0)
            config = peft.LoraConfig(task_type="CAUSAL_LM", **arguments)
            network: Any = peft.get_peft_model(models.network(models.folder(NAME, "float32"), "float32"), config)
            weights = [parameter for parameter in network.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE)
            ids = torch.tensor([parts()[name]])
            for _ in range(NUM_STEPS):
                optimizer.zero_grad()
                network(ids, labels=ids).loss.backward()
                optimizer.step()
            network.save_pretrained(path / name, save_embedding_layers=False)

    settings = repr((ADAPTERS, NUM_TOKENS, NUM_STEPS, LEARNING_RATE)).encode()
    path = models.made(models.CACHE / NAME / f"adapters-{hashlib.sha256(settings).hexdigest()[:12]}", make)
    return {name: path / name for name in ADAPTERS}


@torch.inference_mode()
def logits_of_peft(folder: Path, texts: Iterable[list[int]], bare: bool = False) -> dict[str, torch.Tensor]:
    """[T, V] of each text under the adapter of its place in `parts`, or under the bare base, in float32 over a folder's
    weights.
    """
    network, logits = models.network(folder, "float32"), {}
    for name, text in zip(parts(), texts, strict=True):
        adapter = None if bare else trained().get(name)
        adapted = network if adapter is None else peft.PeftModel.from_pretrained(network, str(adapter)).eval()
        logits[name] = adapted(torch.tensor([text])).logits[0]
        network = network if adapter is None else adapted.unload()
    return logits


def likelihoods(logits: dict[str, torch.Tensor]) -> dict[str, float]:
    """The mean negative log likelihood of each part."""
    return {
        name: float(likelihood.of_tokens(logits[name][: len(ids) - 1], torch.tensor(ids[1:])).mean())
        for name, ids in parts().items()
    }


def serve(folder: Path, scratch: Path, dtype: str, **settings: Any) -> tuple[dict[str, list[int]], dict[str, float]]:
    """All parts in one batch, each under its adapter: greedy texts after them, and mean negative log likelihoods."""
    digests = {"": ""} | lay_out(folder, scratch / "store", trained(), dtype)
    requests = [
        Request(
            (1, index), list(ids), len(ids), NUM_NEW, adapter_digest=digests[name],
            logprobs=LogprobParams(prefill=True),
        )
        for index, (name, ids) in enumerate(parts().items())
    ]  # fmt: skip
    config = ShardConfig(
        NAME, str(folder), "unix:/dev/null", dtype=dtype, max_total_tokens=256, num_pages=128, threads=1,
        adapter_store=str(scratch / "store"), max_active_adapters=len(ADAPTERS), cpu_memory=1 << 30, **settings,
    )  # fmt: skip
    texts, means = {}, {}
    for name, output in zip(parts(), outputs_of(config, requests), strict=True):
        assert output.details is not None
        logprobs = output.details.prefill_logprobs
        assert len(logprobs) == NUM_TOKENS - 1
        texts[name], means[name] = output.token_ids, -sum(logprobs) / len(logprobs)
    return texts, means


def test_greedy_texts_are_those_of_peft(tmp_path: Path) -> None:
    folder = models.folder(NAME, "float32")
    texts, means = serve(folder, tmp_path, "float32")
    logits = logits_of_peft(folder, ([*ids, *texts[name]] for name, ids in parts().items()))
    for name, text in texts.items():  # each token of a text must be the likeliest after those before it
        assert len(text) == NUM_NEW
        before = logits[name][NUM_TOKENS - 1 : -1]
        chosen = before.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert float((before.amax(1) - chosen).max()) < TIE, name
    assert means == pytest.approx(likelihoods(logits), abs=1e-4)


def test_likelihoods_over_the_blocks_of_a_file_are_those_of_peft(tmp_path: Path) -> None:
    """In float32, with activations that are not rounded."""
    folder = tmp_path / "served"
    assert "error" not in answer_of(models.gguf_file(NAME), folder)
    _, means = serve(folder, tmp_path, "float32", quantize_activations="none")
    expected = likelihoods(logits_of_peft(models.folder(NAME, "float32"), parts().values()))
    assert means == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("form", ["bfloat16", "gguf"])
def test_likelihoods_are_those_of_peft(form: str, tmp_path: Path) -> None:
    """PEFT computes the same weights in float32: those of the bfloat16 folder, or what the file's blocks hold."""
    folder = values = models.folder(NAME, "bfloat16")
    if form == "gguf":
        folder, values = tmp_path / "served", models.folder(NAME, "float32")
        assert "error" not in answer_of(models.gguf_file(NAME), folder)
    _, means = serve(folder, tmp_path, "bfloat16")
    expected = likelihoods(logits_of_peft(values, parts().values()))
    bare = likelihoods(logits_of_peft(values, parts().values(), bare=True))
    assert min(bare[name] - expected[name] for name in ADAPTERS) >= LEAST_LEARNED
    differences = {name: means[name] - expected[name] for name in means}
    assert max(map(abs, differences.values())) <= MOST_OF_ONE, differences
    assert abs(sum(differences.values())) <= MOST * len(differences), differences

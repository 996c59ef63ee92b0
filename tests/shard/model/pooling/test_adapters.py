"""Adapters of embedders and classifiers, with their heads: sixteen requests under several of them equal PEFT."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from tests import tiny_pooled
from tests.adapters.making import randomise
from tests.shard.engine.adapter_exactness import lay_out
from tests.shard.model.pooling.pooled_engine import PooledEngine, prompts_of
from tests.shard.near import worst_share

CASES = {
    "bert embed": ("bert", "embed", "FEATURE_EXTRACTION", ["query", "value", "dense"]),
    "qwen3 embed": ("qwen3", "embed", "FEATURE_EXTRACTION", ["q_proj", "down_proj"]),
    "bert classify": ("bert", "classify", "SEQ_CLS", ["query", "value", "dense"]),
    "roberta classify": ("roberta", "classify", "SEQ_CLS", ["query", "key"]),
    "llama classify": ("llama", "classify", "SEQ_CLS", ["q_proj", "v_proj"]),
    "distilbert token-classify": ("distilbert", "token-classify", "TOKEN_CLS", ["q_lin", "ffn.lin1"]),
}


def make_adapter(folder: Path, base: Path, task: str, task_type: str, targets: list[str], seed: int) -> Path:
    """Have PEFT save an adapter with random weights, and a new head where the task has one."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type=task_type)
    config.init_lora_weights = False
    torch.manual_seed(seed)
    model: Any = peft.get_peft_model(tiny_pooled.CLASSES[task].from_pretrained(base, dtype=torch.float32), config)
    randomise(model, config)
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def of_peft(base: Path, folder: Path | None, task: str, prompts: list[list[int]], pooling: str) -> list[torch.Tensor]:
    """[rows, size] of each prompt alone."""
    model: Any = tiny_pooled.CLASSES[task].from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    model = model if folder is None else peft.PeftModel.from_pretrained(model, folder)
    outputs = [model.eval()(input_ids=torch.tensor([prompt])) for prompt in prompts]
    if task != "embed":
        return [output.logits[0].view(-1, output.logits.shape[-1]) for output in outputs]
    states = [output.last_hidden_state[0] for output in outputs]
    return [rows.mean(0, keepdim=True) if pooling == "mean" else rows[-1:] for rows in states]


SAMPLE = ("bert embed", "llama classify")
"""What `make test` runs."""


@pytest.mark.parametrize(
    "case", [case if case in SAMPLE else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_requests_under_several_adapters_equal_peft(case: str, tmp_path: Path) -> None:
    name, task, task_type, targets = CASES[case]
    options = {} if task == "embed" else {"num_labels": 3}
    base = tiny_pooled.make(name, tmp_path / "base", task, **options)
    pooling = "last" if name in tiny_pooled.DECODERS else "mean"
    if task == "embed":
        tiny_pooled.sentence_transformer(base, pooling, normalize=False)
    adapters = {
        str(seed): make_adapter(tmp_path / str(seed), base, task, task_type, targets, seed) for seed in range(2)
    }
    digests = lay_out(base, tmp_path / "store", adapters)
    engine = PooledEngine(base, adapter_store=str(tmp_path / "store"), cpu_memory=1 << 27)
    prompts = prompts_of()
    chosen = [(None, "0", "1")[index % 3] for index in range(len(prompts))]
    engine.run(prompts[:2], digests=[digests["0"], digests["1"]])  # once both are resident, a step has rows of both
    together = engine.run(prompts, digests=[digests[name] if name else "" for name in chosen])
    expected = {name: of_peft(base, adapters.get(name or ""), task, prompts, pooling) for name in (None, "0", "1")}
    for index, (adapter, vectors) in enumerate(zip(chosen, together, strict=True)):
        want = expected[adapter][index]
        assert worst_share(vectors, want) <= 2e-5
    assert float((expected[None][0] - expected["0"][0]).abs().max()) > 1e-3
    for index in (1, 5):
        [alone] = engine.run([prompts[index]], digests=[digests[chosen[index] or ""]])
        assert torch.equal(alone, together[index])


def test_adapters_of_other_tasks_and_other_labels_are_refused(tmp_path: Path) -> None:
    base = tiny_pooled.make("bert", tmp_path / "base", "classify", num_labels=3)
    other = tiny_pooled.make("bert", tmp_path / "other", "classify", num_labels=2)
    embedder = tiny_pooled.make("bert", tmp_path / "embedder")
    labels = make_adapter(tmp_path / "labels", other, "classify", "SEQ_CLS", ["query"], 0)
    with pytest.raises(AdapterInvalid, match="made for another base or rank"):
        lay_out(base, tmp_path / "store", {"a": labels})
    with pytest.raises(NotServed, match="'SEQ_CLS' is not served with this base"):
        lay_out(embedder, tmp_path / "store2", {"a": labels})

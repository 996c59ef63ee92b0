"""Adapters that add tokens to the base's: each request in a mixed batch gets what PEFT gives it alone."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import MedusaShape
from lorikeet.proto.params import Method, Speculation
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.requests.request import Request
from tests import tiny
from tests.adapters import making
from tests.adapters.medusa import small
from tests.shard.engine.adapter_exactness import Text, Tried, compare, lay_out, load_plain, oracle, outputs_of
from tests.shard.engine.exactness import NEW_TOKENS, prompts_of

SIZE, EXTRA = 320, 6
ADDED = (SIZE, SIZE + 1)
LOOKUP, HEADS = Speculation(Method.LOOKUP, 4), Speculation(Method.MEDUSA, 0, 3)
TARGETS = ["q_proj", "v_proj", "down_proj"]
ENDS = ["embed_tokens", "lm_head"]
CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "whole ends": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=ENDS),
    "whole embedding": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=ENDS[:1]),
    "trained tokens": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[5, *ADDED]),
    "trained tokens of both": lambda: peft.LoraConfig(
        r=4, target_modules=TARGETS, trainable_token_indices=dict.fromkeys(ENDS, [5, *ADDED])
    ),
    "no trained tokens": lambda: peft.LoraConfig(r=4, target_modules=TARGETS),
    "LoRA on ends": lambda: peft.LoraConfig(r=4, target_modules=[*TARGETS, *ENDS]),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
}
NUM_ADDED = {"whole embedding": 5, "no trained tokens": 3}
"""Where it is not 2."""


def resized(base: Path, num_added: int) -> Any:
    """The base as a caller of PEFT prepares it."""
    network = load_plain(base)
    torch.manual_seed(0)
    network.resize_token_embeddings(SIZE + num_added)
    with torch.no_grad():  # so that a network without an adapter chooses them too
        for end in {network.get_input_embeddings(), network.get_output_embeddings()}:
            end.weight[SIZE:].normal_(std=1.5 * float(end.weight[:SIZE].std()))
    return network


def make(name: str, base: Path, folder: Path) -> Path:
    """Have PEFT save the adapter, with values as after training."""
    torch.manual_seed(len(name))
    model = peft.get_peft_model(resized(base, NUM_ADDED.get(name, 2)), CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_added_tokens_in_a_mixed_batch(is_tied: bool, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")  # PEFT's own, about merging and training
    base = tiny.make("llama", tmp_path / "base", seed=1, tie_word_embeddings=is_tied)
    adapters = {name: make(name, base, tmp_path / name) for name in CONFIGS}
    adapters["plain"] = making.make_adapter(base, tmp_path / "plain", peft.LoraConfig(r=4, target_modules=TARGETS))
    files.write(tmp_path / "heads", small.heads(MedusaShape(3, 1, 64), scale=0.01))
    digests = lay_out(base, tmp_path / "store", {**adapters, "heads": tmp_path / "heads"}, num_extra=EXTRA)
    names = [name for name in [*adapters, ""] for _ in range(2)]
    prompts = prompts_of("llama", tuple(5 + 2 * number for number in range(len(names))))
    for prompt, name in zip(prompts, names, strict=True):
        if name in CONFIGS:
            prompt[1:3] = ADDED
    expected: list[Text] = []
    for name, prompt in zip(names, prompts, strict=True):
        network = resized(base, NUM_ADDED.get(name, 2)) if name in CONFIGS else load_plain(base)
        expected += oracle(base, adapters, [name], [prompt], lambda _, network=network: network)
    assert sum(max(text.token_ids) >= SIZE for text in expected) >= 4, "texts without added tokens prove little"
    requests = [
        Request((1, index), list(prompt), len(prompt), NEW_TOKENS, adapter_digest=digests[name] if name else "")
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    for request in requests:
        request.speculation = HEADS if request.key[1] % 2 else LOOKUP
        request.heads_digest = digests["heads"] if request.key[1] % 2 else ""
    config = ShardConfig(
        "llama", str(base), "unix:/dev/null", dtype="float32", max_total_tokens=128, step_tokens=40,
        adapter_store=str(tmp_path / "store"), max_active_adapters=12, speculation_max_batch_size=32,
        adapter_extra_vocab_size=EXTRA,
    )  # fmt: skip
    outputs = outputs_of(config, requests)
    tried = Tried("llama", 12)
    compare(tried, expected, [output.token_ids for output in outputs], names)
    assert not tried.differences, tried
    assert tried.num_ties <= 1, tried

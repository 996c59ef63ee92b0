"""Adapters on the output head and the embedding, as PEFT saves them, in one batch against PEFT.

PEFT saves the base's embedding and head with such adapters, under the head's own name even if both share one weight.
"""

import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.kernels import cpu
from tests import tiny
from tests.shard.engine.adapter_exactness import (
    Tried,
    compare,
    lay_out,
    make_adapters,
    not_of_base,
    oracle,
    through_engine,
)
from tests.shard.engine.exactness import prompts_of

WEIGHTS = "adapter_model.safetensors"
TARGETS = {"head": ["lm_head"], "embedding": ["embed_tokens"], "both": ["embed_tokens", "lm_head"]}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_base(folder: Path, *, is_tied: bool, is_rounded: bool) -> Path:
    """A Llama. If it is rounded, bfloat16 represents its embedding and its head exactly."""
    base = tiny.make("llama", folder, tie_word_embeddings=is_tied)
    if is_rounded:
        model = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                module.weight.copy_(module.weight.bfloat16())
        model.save_pretrained(base)
    return base


def make_files(base: Path, folder: Path, *, is_tied: bool) -> dict[str, Path]:
    """Adapters by name: each target, with and without the base's tensors, in both types."""
    made: dict[str, Path] = {}
    for is_saved in (True, False):
        kind = "with tensors" if is_saved else "alone"
        configs = {
            f"{name} {kind}": peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
            for name, targets in TARGETS.items()
        }
        if is_tied:
            configs[f"tied {kind}"] = peft.LoraConfig(
                r=4, lora_alpha=8, target_modules=TARGETS["both"], ensure_weight_tying=True
            )
        made |= make_adapters(base, folder, configs, seed=3, save_embedding_layers=is_saved)
    for name, path in list(made.items()):
        rounded = folder / f"{name} bfloat16"
        peft.PeftConfig.from_pretrained(path).save_pretrained(rounded)
        save_file({key: tensor.bfloat16() for key, tensor in load_file(path / WEIGHTS).items()}, rounded / WEIGHTS)
        made[f"{name} bfloat16"] = rounded
    return made


def without_base_tensors(path: Path, folder: Path) -> Path:
    """The adapter in `path` without the base's tensors that PEFT saved with it."""
    tensors = {key: tensor for key, tensor in load_file(path / WEIGHTS).items() if ".base_layer." not in key}
    peft.PeftConfig.from_pretrained(path).save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS)
    return folder


def check(base: Path, folder: Path, adapters: dict[str, Path], references: dict[str, Path]) -> None:
    """One batch of all adapters gives the texts that PEFT gives with `references`."""
    chosen = [*adapters, ""]
    prompts = prompts_of("llama", [5 + 2 * number for number in range(len(chosen))])
    expected = oracle(base, references, chosen, prompts)
    changed = not_of_base(base, prompts, [text.token_ids for text in expected])[:-1]
    assert sum(changed) > 0.8 * len(changed), "adapters that change nothing prove nothing"
    digests = lay_out(base, folder / "store", adapters)
    config = ShardConfig(
        "llama", str(base), "unix:/dev/null", dtype="float32", max_total_tokens=128, step_tokens=40,
        adapter_store=str(folder / "store"), max_active_adapters=8,
    )  # fmt: skip
    texts = through_engine(config, prompts, [digests[name] if name else "" for name in chosen])
    tried = Tried("llama", 8)
    compare(tried, expected, texts, chosen)
    assert not tried.differences and tried.num_ties == 0, tried


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_adapters_on_embedding_and_head_give_what_peft_gives(is_tied: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", is_tied=is_tied, is_rounded=True)
    adapters = make_files(base, tmp_path, is_tied=is_tied)
    saved = [path for path in adapters.values() if any(".base_layer." in key for key in load_file(path / WEIGHTS))]
    assert len(saved) >= 6
    check(base, tmp_path, adapters, adapters)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_base_tensors_that_training_rounded_count_as_unchanged(is_tied: bool, tmp_path: Path) -> None:
    """PEFT's reference has no such tensors: with them it computes with the base's weights as they were rounded."""
    base = make_base(tmp_path / "base", is_tied=is_tied, is_rounded=False)
    adapters = make_files(base, tmp_path, is_tied=is_tied)
    own = AutoModelForCausalLM.from_pretrained(base).get_input_embeddings().weight
    assert not torch.equal(own, own.bfloat16().float())
    references = {name: without_base_tensors(path, tmp_path / f"{name} bare") for name, path in adapters.items()}
    check(base, tmp_path, adapters, references)


@pytest.mark.skipif(not cpu.available(), reason="needs a compiler")
def test_adapters_on_packed_ends_have_the_bits_of_untied_ones(tmp_path: Path) -> None:
    """In bfloat16 a tied embedding reads the packed weight of the head."""
    tied = tiny.make("llama", tmp_path / "tied", tie_word_embeddings=True)
    AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16).save_pretrained(tied)
    untied = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone())
    untied.save_pretrained(tmp_path / "untied")
    configs: dict[str, peft.PeftConfig] = {
        name: peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets) for name, targets in TARGETS.items()
    }
    attention = ["q_proj", "v_proj"]
    configs["whole"] = peft.LoraConfig(r=4, target_modules=attention, modules_to_save=TARGETS["both"])
    configs["token"] = peft.LoraConfig(r=4, target_modules=attention, trainable_token_indices=[3, 5, 7])
    adapters = make_adapters(tmp_path / "untied", tmp_path, configs, seed=3, save_embedding_layers=False)
    chosen = [*adapters, ""]
    prompts = prompts_of("llama", [5 + 2 * number for number in range(len(chosen))])
    results = []
    for base in (tied, tmp_path / "untied"):
        store = tmp_path / f"store of {base.name}"
        digests = lay_out(base, store, adapters, dtype="bfloat16")
        config = ShardConfig(
            "llama", str(base), "unix:/dev/null", max_total_tokens=128, step_tokens=40, adapter_store=str(store),
            max_active_adapters=8,
        )  # fmt: skip
        results.append(through_engine(config, prompts, [digests[name] if name else "" for name in chosen]))
    assert results[0] == results[1]
    assert len(set(map(tuple, results[0]))) == len(chosen)

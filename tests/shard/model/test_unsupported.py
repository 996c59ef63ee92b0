"""Unsupported checkpoints are rejected with a reason before any weight is read."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model import probe as probe_function
from tests import tiny

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def rejection(folder: Path, values: dict[str, object]) -> str:
    """The sentence that a configuration of these values is rejected with."""
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as raised:
        load_model(ShardConfig("some/model", str(folder), "unix:/dev/null"))
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "t5"}, ("t5", "encoder-decoder")),
        ({"model_type": "mamba"}, ("mamba",)),
        ({"model_type": "qwen3_next", **SMALL}, ("qwen3_next", "linear_attention")),
        ({"model_type": "llava"}, ("llava", "images")),
        ({"model_type": "llama4_text", **SMALL}, ("llama4_text", "chunk")),
        ({"model_type": "llama", **SMALL, "quantization_config": {"quant_method": "awq"}}, ("llama", "quantised")),
        (
            {
                "model_type": "llama",
                **SMALL,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            ("llama", "dynamic NTK"),
        ),
        ({"model_type": "deberta-v2", **SMALL}, ("deberta-v2",)),
        ({"model_type": "no_such_thing"}, ("some/model", "no_such_thing")),
        ({"hidden_size": 4}, ("some/model",)),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else "",
)
def test_unsupported_checkpoints_are_rejected(
    values: dict[str, object], words: tuple[str, ...], tmp_path: Path
) -> None:
    sentence = rejection(tmp_path, values)
    assert all(word in sentence for word in words), sentence


def test_the_probe_catches_layers_that_compute_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaModel.forward

    def leaky(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """A model whose tokens see the row's mean, as a packed row must not."""
        output = plain(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", leaky)
    folder = tiny.make("llama", tmp_path)
    with pytest.raises(ValueError, match="llama: packed into one row"):
        load_model(ShardConfig("llama", str(folder), "unix:/dev/null"))


def test_the_probe_passes_every_architecture_of_the_list() -> None:
    config = ShardConfig("tiny", "", "unix:/dev/null", dtype="float32")
    for name in ("qwen2", "stablelm", "opt", "bloom", "falcon_alibi"):
        probe_function(config, AutoConfig.for_model(tiny.VARIANTS[name][0], **tiny.VARIANTS[name][1]))


def test_float16_that_overflows_is_refused(tmp_path: Path) -> None:
    """Embeddings whose products in the MLP exceed its largest number; the other formats hold them."""
    folder = tiny.make("llama", tmp_path)
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.model.layers[1].mlp.up_proj.weight.data *= 1e5
    network.save_pretrained(folder)
    load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype="bfloat16"))
    with pytest.raises(ValueError, match="cannot serve llama in float16: its activations exceed 65,504"):
        load_model(ShardConfig("m", str(folder), "unix:/dev/null", dtype="float16"))


def test_the_probe_draws_its_weights_once_and_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of a large model are gigabytes: minutes on the host, and twice that for two networks."""
    module = sys.modules["lorikeet.shard.model.probe"]
    drawn: list[dict[str, int]] = []

    def parameters(network: torch.nn.Module) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in network.named_parameters()}

    def vary(network: torch.nn.Module, plain: Callable[[torch.nn.Module], None] = module.vary) -> None:
        plain(network)
        drawn.append(parameters(network))

    plain_assemble = module.assemble

    def assemble(network: torch.nn.Module, *rest: Any, **named: Any) -> Any:
        assert [parameters(network)] == drawn
        return plain_assemble(network, *rest, **named)

    monkeypatch.setattr(module, "vary", vary)
    monkeypatch.setattr(module, "assemble", assemble)
    config = ShardConfig("tiny", "unused", "unix:unused")
    checkpoint = AutoConfig.for_model(tiny.VARIANTS["llama"][0], **tiny.VARIANTS["llama"][1])
    probe_function(config, checkpoint)
    assert len(drawn) == 1

    devices: list[torch.device] = []

    def from_config(*_: Any, **__: Any) -> None:
        devices.append(torch.get_default_device())
        raise RuntimeError("no network")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", from_config)
    with pytest.raises(ValueError, match="no network"):
        probe_function(replace(config, device="meta"), checkpoint)
    assert devices == [torch.device("meta")]

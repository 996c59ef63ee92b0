"""Unsupported checkpoints are rejected with a reason before any weight is read."""

import json
from pathlib import Path

import pytest
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

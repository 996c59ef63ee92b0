"""What config.json decides about a model before its weights are read."""

from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lorikeet.launcher.config.settings import read
from lorikeet.launcher.exits import LauncherError
from lorikeet.launcher.models import model
from lorikeet.launcher.models.model import Use


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
    ],
)
def test_rotary_scaling_adds_positions(config: dict[str, Any], positions: int | None) -> None:
    assert model.num_positions(config) == positions


def test_the_architectures_are_those_of_transformers() -> None:
    assert model._architectures() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, ""),
        ({}, ""),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, ""),
        ({"model_type": "mine"}, "transformers has no causal language model of model_type 'mine'"),
        ({"model_type": "llava", "vision_config": {}}, "it takes images"),
    ],
)
def test_unsupported_models(config: dict[str, Any], reason: str) -> None:
    said = model.unsupported(config)
    assert said.startswith(reason) and bool(said) == bool(reason)


def test_more_positions_than_the_model_has_need_a_flag() -> None:
    config = {"model_type": "llama", "max_position_embeddings": 2048}
    words = ["--max-total-tokens", "4096"]
    with pytest.raises(LauncherError, match=r"above the 2048 positions of it: .*--allow-long-max-total-tokens"):
        model.check_config("it", config, Use.of(read(words, {}, "box"), 1))
    forced = read([*words, "--allow-long-max-total-tokens"], {}, "box")
    model.check_config("it", config, Use.of(forced, 1))
    model.check_config("it", config, Use.of(read([], {}, "box"), 1))

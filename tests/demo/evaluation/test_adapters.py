"""The committed adapters: plain PEFT loads them, they are small, and a sample of their figures holds."""

import importlib
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data.tasks import tool_chat
from lorikeet.demo.data.tasks.example import held_out_examples
from lorikeet.demo.evaluation import score
from lorikeet.demo.training import lora
from lorikeet.demo.training.lora import ADAPTERS_FOLDER, RECIPES
from lorikeet.demo.training.model import BASE_FOLDER

MAX_COMMITTED_BYTES = 11_500_000
MAX_TOOLS_BYTES = 3_000_000
NUM_SAMPLED = 24


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


@pytest.fixture
def base() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


def test_there_are_four_or_more_of_different_kinds() -> None:
    configs = [json.loads((ADAPTERS_FOLDER / name / "adapter_config.json").read_text()) for name in RECIPES]
    assert len(configs) >= 4
    assert len({config["r"] for config in configs}) >= 3
    kinds = [
        {name for name in ("use_rslora", "use_dora", "alora_invocation_tokens") if config[name]} for config in configs
    ]
    for kind in (set(), {"use_rslora"}, {"use_dora"}, {"alora_invocation_tokens"}):
        assert kind in kinds
    assert {config["base_model_name_or_path"] for config in configs} == {lora.BASE_NAME}


def test_their_files_are_bf16_safetensors_and_small() -> None:
    for name in RECIPES:
        with safe_open(ADAPTERS_FOLDER / name / lora.WEIGHTS_FILE, framework="pt") as weights:
            assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert sum(path.stat().st_size for path in ADAPTERS_FOLDER.rglob("*")) < MAX_COMMITTED_BYTES


def test_the_adapter_for_tools_has_the_base_s_tokenizer_with_its_own_templates(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    folder = ADAPTERS_FOLDER / "tools"
    own = AutoTokenizer.from_pretrained(folder)
    assert own.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (own.chat_template, own.response_template) == (tool_chat.CHAT_TEMPLATE, tool_chat.RESPONSE_TEMPLATE)
    assert sum(path.stat().st_size for path in folder.iterdir()) < MAX_TOOLS_BYTES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "grounded" else pytest.mark.long) for name in RECIPES]
)
def test_an_adapter_answers_where_the_bare_base_does_not(
    name: str, base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    task = importlib.import_module(f"lorikeet.demo.data.tasks.{RECIPES[name].task}")
    examples = held_out_examples(task, NUM_SAMPLED)
    bare = sum(written.is_right for written in score.write(base, tokenizer, examples))
    adapted = sum(
        written.is_right for written in score.write(lora.load(base, ADAPTERS_FOLDER / name), tokenizer, examples)
    )
    assert bare <= 0.1 * NUM_SAMPLED
    assert adapted >= 0.85 * NUM_SAMPLED  # room for 24 being few

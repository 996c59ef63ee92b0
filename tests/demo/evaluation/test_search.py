"""The committed adapter `search`: plain PEFT loads it, it is small, and a sample of its figures holds."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

from lorikeet.demo.data import corpus
from lorikeet.demo.data.descriptions import described
from lorikeet.demo.evaluation.search import ranks, recall, vectors
from lorikeet.demo.training import lora
from lorikeet.demo.training.model import BASE_FOLDER
from lorikeet.demo.training.search import ADAPTER_FOLDER
from lorikeet.demo.training.search_trainer import SearchRecipe

MAX_BYTES = 4_000_000


def test_its_files_are_those_of_the_recipe_and_small() -> None:
    config, recipe = json.loads((ADAPTER_FOLDER / "adapter_config.json").read_text()), SearchRecipe()
    assert (config["task_type"], config["r"]) == ("FEATURE_EXTRACTION", recipe.rank)
    assert config["target_modules"] == sorted(recipe.targets)
    assert config["base_model_name_or_path"] == lora.BASE_NAME
    assert {tensor.dtype for tensor in load_file(ADAPTER_FOLDER / lora.WEIGHTS_FILE).values()} == {torch.bfloat16}
    assert sum(path.stat().st_size for path in ADAPTER_FOLDER.iterdir()) <= MAX_BYTES


@pytest.mark.long
def test_it_finds_functions_by_their_description_and_the_bare_base_does_not() -> None:
    pairs = described(corpus.held_out_files())
    descriptions, codes = [pair.description for pair in pairs], [pair.code for pair in pairs]
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    base, wanted = AutoModel.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval(), range(len(pairs))
    bare = ranks(vectors(base, tokenizer, descriptions), vectors(base, tokenizer, codes), wanted)
    model = PeftModel.from_pretrained(base, ADAPTER_FOLDER).eval()
    adapted = ranks(vectors(model, tokenizer, descriptions), vectors(model, tokenizer, codes), wanted)
    assert recall(bare, 10) <= 0.4
    assert recall(adapted, 10) >= 0.7


def test_ranks_count_what_is_closer() -> None:
    found = ranks(torch.eye(3), torch.tensor([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), [0, 0, 2])
    assert found.tolist() == [1, 0, 0]
    assert (recall(found, 1), recall(found, 2)) == (0.6667, 1.0)

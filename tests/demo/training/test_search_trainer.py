"""The adapter `search` is a function of seed and recipe: resumed, it ends with the same weights. On a toy base."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaModel, PreTrainedTokenizerFast

from lorikeet.demo.data.corpus import CorpusFunction
from lorikeet.demo.data.descriptions import Described, code_of, description_of
from lorikeet.demo.training.model import BASE_FOLDER, base_config
from lorikeet.demo.training.search_trainer import SearchRecipe, SearchTrainer, attach, embed, loss_of

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
RECIPE = SearchRecipe(rank=4, alpha=8, targets=("q_proj", "down_proj"), num_steps=8, pairs_per_step=4, warmup_steps=2)
PAIRS = [Described(f"Return the {word}", f"def {word}(x):\n    return x.{word}\n") for word in "abcdefghij"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


def toy_trainer(tokenizer: PreTrainedTokenizerFast, recipe: SearchRecipe = RECIPE) -> SearchTrainer:
    torch.manual_seed(5)
    base = LlamaModel(base_config(**SHAPE, num_key_value_heads=1, head_dim=16))
    return SearchTrainer(attach(base, recipe), tokenizer, PAIRS, recipe, seed=0)


def weights(trainer: SearchTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    whole, first, second = (toy_trainer(tokenizer) for _ in range(3))
    losses = [whole.run_step().loss for _ in range(RECIPE.num_steps)]
    again = [first.run_step().loss for _ in range(3)]
    first.save(tmp_path / "checkpoint.pt")
    second.resume(tmp_path / "checkpoint.pt")
    again += [second.run_step().loss for _ in range(RECIPE.num_steps - 3)]
    assert losses == again and losses[-1] < losses[0]
    assert all(torch.equal(one, two) for one, two in zip(weights(whole), weights(second), strict=True))
    other = toy_trainer(tokenizer, SearchRecipe())
    with pytest.raises(ValueError, match="another recipe"):
        other.resume(tmp_path / "checkpoint.pt")


def test_a_vector_does_not_depend_on_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    model, texts = toy_trainer(tokenizer).model.eval(), ["a text", "another and longer text"]
    with torch.inference_mode():
        together = embed(model, tokenizer, texts)
        alone = torch.cat([embed(model, tokenizer, [text]) for text in texts])
    assert torch.allclose(together, alone, atol=1e-6)
    assert torch.allclose(together.norm(dim=1), torch.ones(2))


def test_the_loss_is_least_where_pairs_are_closest() -> None:
    vectors = torch.eye(4)
    assert loss_of(vectors, vectors, 0.05) < 1e-4 < loss_of(vectors, vectors.roll(1, 0), 0.05)


def test_a_description_is_the_first_sentence_and_no_part_of_the_code() -> None:
    source = 'def f(x):\n    """Return the\n    answer. Never fails.\n\n    More."""\n    return x\n'
    function = CorpusFunction("a.py", "f", source, "Return the\nanswer. Never fails.\n\nMore.", 5)
    assert description_of(function) == "Return the answer"
    assert code_of(function) == "def f(x):\n    return x\n"
    assert description_of(CorpusFunction("a.py", "f", source, None, 5)) is None
    assert description_of(CorpusFunction("a.py", "f", source, "Too short.", 5)) is None

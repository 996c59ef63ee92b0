"""The committed draft model: it is small, uses the base's tokens, and a sample of its overlap with the base holds."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lorikeet.demo.data import corpus
from lorikeet.demo.evaluation.draft import compare, rows_of
from lorikeet.demo.training.distill import DRAFT_FOLDER
from lorikeet.demo.training.model import BASE_FOLDER

NUM_SAMPLED_ROWS = 8


@pytest.fixture(scope="module")
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    base, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (BASE_FOLDER, DRAFT_FOLDER))
    return base.float().eval(), draft.float().eval()


def test_a_tenth_of_the_base_with_its_tokenizer(models: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    base, draft = models
    assert 10 * draft.num_parameters() <= base.num_parameters()
    of_base, of_draft = (AutoTokenizer.from_pretrained(folder) for folder in (BASE_FOLDER, DRAFT_FOLDER))
    assert of_base.get_vocab() == of_draft.get_vocab()
    assert [path.name for path in DRAFT_FOLDER.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.long
def test_the_base_accepts_most_draft_tokens(models: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    base, draft = models
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    rows = sorted(rows_of(corpus.held_out_files(), tokenizer), key=len)[-NUM_SAMPLED_ROWS:]
    found = compare(base, draft, rows)
    assert found.overlap.mean() >= 0.55  # the mean over eight rows; `lorikeet.demo.evaluation draft` takes all
    shuffled = compare(base, draft, [row[::-1] for row in rows])
    assert shuffled.overlap.mean() < found.overlap.mean()  # the order of tokens says something to it

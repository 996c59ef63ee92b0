"""The score: a row is stopped early only if it cannot be right, and only complete answers count."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data.tasks.example import Example
from lorikeet.demo.evaluation import score
from lorikeet.demo.evaluation.score import Written
from lorikeet.demo.training.model import BASE_FOLDER

PROMPTS = (
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n",
    "for i in range(10):\n",
    "class A:\n    def __init__(self):\n        self.x = 1\n",
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, num_tokens: int) -> str:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(num_tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    text: str = tokenizer.decode(ids[0, -num_tokens:])
    return text.split(tokenizer.eos_token)[0]


def test_the_text_is_the_greedy_one_whatever_else_is_in_the_batch(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = {prompt: greedy(model, tokenizer, prompt, 12) for prompt in PROMPTS}
    examples = [Example(prompt, text, frozenset()) for prompt, text in expected.items()]
    for written in score.write(model, tokenizer, examples):
        assert written.text.startswith(expected[written.example.prompt])


def test_a_row_ends_at_the_first_mismatch(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    examples = [Example(prompt, "§" * 40, frozenset()) for prompt in PROMPTS]
    for written in score.write(model, tokenizer, examples):
        assert written.text == greedy(model, tokenizer, written.example.prompt, 1)
        assert not written.is_right


def test_a_whole_text_goes_on_after_a_mismatch(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    examples = [Example(PROMPTS[1], "§" * 4, frozenset())]
    (written,) = score.write(model, tokenizer, examples, to_the_end=True)
    assert written.text.startswith(greedy(model, tokenizer, PROMPTS[1], 8))


@pytest.mark.parametrize(
    ("text", "ended", "right"), [("x = 1", True, True), ("x = 1", False, False), ("x = 12", True, False)]
)
def test_only_the_whole_answer_and_its_end_count(text: str, ended: bool, right: bool) -> None:
    assert Written(Example("p\n", "x = 1", frozenset()), text, ended).is_right is right

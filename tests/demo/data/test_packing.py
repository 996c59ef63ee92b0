"""A packed row computes what each of its examples computes alone, and labels answers and their ends only."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from lorikeet.demo.data.packing import NO_LABEL, PADDING, pack
from lorikeet.demo.data.tasks.example import Example
from lorikeet.demo.training.model import BASE_FOLDER

GROUPS = [
    [Example("a = 1\nb = 2\nfirst?\n", "a is 1", frozenset()), Example("a = 1\nb = 2\nlast?\n", "b", frozenset())],
    [Example("def f(x):\n", "return x", frozenset())],
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


def alone(example: Example, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    return tokenizer(example.prompt)["input_ids"], tokenizer(example.answer, add_special_tokens=False)["input_ids"]


@torch.inference_mode()
def test_a_branch_has_the_hidden_states_of_its_example_alone(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    batch = pack(GROUPS, tokenizer)
    packed = model.model(
        batch.input_ids, attention_mask=batch.mask, position_ids=batch.position_ids, use_cache=False
    ).last_hidden_state
    for row, group in enumerate(GROUPS):
        for branch, example in enumerate(group, start=1):
            prompt, answer = alone(example, tokenizer)
            whole = model.model(torch.tensor([[*prompt, *answer]]), use_cache=False).last_hidden_state[0]
            here = packed[row, (batch.branch_ids[row] == branch) & (batch.labels[row] != NO_LABEL)]
            torch.testing.assert_close(here, whole[len(prompt) - 1 :], atol=1e-4, rtol=1e-4)


def test_labels_are_the_answers_tokens_and_the_end(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = pack(GROUPS, tokenizer)
    for row, group in enumerate(GROUPS):
        for branch, example in enumerate(group, start=1):
            labels = batch.labels[row, batch.branch_ids[row] == branch]
            expected = [*alone(example, tokenizer)[1], tokenizer.eos_token_id]
            assert labels[labels != NO_LABEL].tolist() == expected


def test_the_common_start_is_computed_once(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = pack(GROUPS[:1], tokenizer)
    total = sum(len(prompt) + len(answer) for prompt, answer in (alone(example, tokenizer) for example in GROUPS[0]))
    common = len(tokenizer("a = 1\nb = 2\n")["input_ids"])
    assert total - common - 2 <= batch.input_ids.shape[1] <= total - common + 2


def test_labels_ahead_stay_inside_their_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = pack(GROUPS, tokenizer)
    for distance in (1, 2, 3):
        ahead = batch.ahead(distance)
        for row, group in enumerate(GROUPS):
            for branch, example in enumerate(group, start=1):
                here = (batch.branch_ids[row] == branch) & (batch.labels[row] != NO_LABEL)
                whole = [*alone(example, tokenizer)[1], tokenizer.eos_token_id]
                expected = [*whole[distance:], *[NO_LABEL] * min(distance, len(whole))]
                assert ahead[row, here].tolist() == expected
        assert (ahead[batch.labels == NO_LABEL] == NO_LABEL).all()


def test_padding_is_masked(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = pack(GROUPS, tokenizer)
    padding = batch.branch_ids == PADDING
    assert padding.any()
    seen = batch.mask[:, 0] & padding[:, None, :] & ~padding[:, :, None]
    assert not seen.any()
    assert batch.mask.any(dim=-1).all()  # a row that sees nothing would be NaN

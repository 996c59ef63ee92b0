"""Prompts have exactly as many tokens as asked for, and no two begin alike."""

from benchmarks.models.prompts import prompts, words
from benchmarks.models.random_llama import tokenizer

VOCABULARY = 8192


def test_every_word_is_one_token_and_text_survives() -> None:
    made = tokenizer(VOCABULARY)
    assert len(made) == VOCABULARY
    for text in prompts(20, 256, seed=3):
        ids = made(text)["input_ids"]
        assert len(ids) == 256
        assert made.decode(ids) == text


def test_no_prefix_can_hit() -> None:
    texts = prompts(200, 16, seed=4)
    assert len({text.split()[0] for text in texts}) == 200
    assert texts == prompts(200, 16, seed=4)
    assert texts != prompts(200, 16, seed=5)
    assert len(set(words(VOCABULARY))) == len(words(VOCABULARY))

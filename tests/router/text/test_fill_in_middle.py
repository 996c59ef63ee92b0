"""Prompts for the middle of a text, by the tokens that a tokenizer has."""

import pytest
import tokenizers
from tokenizers import models

from lorikeet.router.text.tokenizer import FillInMiddle


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]b[PREFIX]a"),
    ],
)
def test_the_order_is_the_family_s(tokens: list[str], prompt: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.add_special_tokens(tokens[:-1])
    assert FillInMiddle.find(backend) is None
    backend.add_special_tokens(tokens)
    fim = FillInMiddle.find(backend)
    assert fim is not None
    assert fim.prompt("a", "b") == prompt
    assert fim.prompt("{x}", "{prefix}").count("{prefix}") == 1

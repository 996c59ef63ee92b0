"""The tokenizer is lossless, its training is repeatable, and transformers loads it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lorikeet.demo.data import tokenizer
from lorikeet.demo.training.model import BASE_FOLDER

TEXTS = ["def f(x):\n    return x + 1\n", "class Zoë:\n\tpass\r\n", "    indented = 'naïve ☃ 🦜'\n\n\n# end"] * 5


@pytest.fixture(scope="module")
def committed() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


def test_it_loads_as_a_fast_tokenizer_with_its_special_tokens(committed: PreTrainedTokenizerFast) -> None:
    assert committed.is_fast
    assert len(committed) == tokenizer.VOCABULARY_SIZE
    assert (committed.bos_token, committed.eos_token, committed.pad_token) == (
        tokenizer.BOS,
        tokenizer.EOS,
        tokenizer.PAD,
    )
    assert [committed.convert_ids_to_tokens(i) for i in range(7)] == tokenizer.SPECIAL_TOKENS


@given(text=st.text())
def test_any_text_is_decoded_unchanged(committed: PreTrainedTokenizerFast, text: str) -> None:
    ids = committed(text)["input_ids"]
    assert ids[0] == committed.bos_token_id
    assert committed.decode(ids[1:]) == text


def test_a_word_has_the_same_tokens_within_a_line_and_after_an_indentation(committed: PreTrainedTokenizerFast) -> None:
    word = committed.backend_tokenizer.encode(" return", add_special_tokens=False).ids
    indented = committed.backend_tokenizer.encode("x = 1\n    return", add_special_tokens=False).ids
    assert len(word) == 1
    assert indented[-1:] == word


def test_the_chat_template_writes_what_the_model_was_trained_on(committed: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
    ]
    text = committed.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>You write Python.<|end|><|user|>Add.<|end|><|assistant|>"
    with pytest.raises(Exception, match="not wizard"):
        committed.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_training_twice_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tokenizer.save(tokenizer.train(iter(TEXTS), vocabulary_size=300), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "tokenizer.json" in files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()

"""The stream of training tokens: seekable, seeded, complete, and tokenized like prompts."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lorikeet.demo.data import mixture
from lorikeet.demo.data.corpus import CorpusFunction, SourceFile
from lorikeet.demo.data.mixture import TokenStream
from lorikeet.demo.training.model import BASE_FOLDER

PIECES = [np.arange(10 * i, 10 * i + i + 1, dtype=np.uint16) for i in range(6)]
FUNCTION = CorpusFunction(
    "a.py", "add", 'def add(a, b):\n    """Add two\n    numbers."""\n    return a + b\n', "Add two\nnumbers.", 3
)


@given(start=st.integers(0, 100), cut=st.integers(0, 60), length=st.integers(1, 60))
def test_a_part_of_the_stream_does_not_depend_on_earlier_reads(start: int, cut: int, length: int) -> None:
    whole = TokenStream(PIECES, seed=1, block_len=4).read(start, cut + length)
    assert whole.tolist()[cut:] == TokenStream(PIECES, seed=1, block_len=4).read(start + cut, length).tolist()


def test_each_epoch_has_every_document_once_in_another_order() -> None:
    stream = TokenStream(PIECES, seed=1, block_len=4)
    epochs = [stream.read(i * stream.epoch_len, stream.epoch_len).tolist() for i in range(3)]
    assert all(sorted(epoch) == sorted(np.concatenate(PIECES).tolist()) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != TokenStream(PIECES, seed=2, block_len=4).read(0, stream.epoch_len).tolist()


def test_blocks_stay_whole_and_are_shuffled() -> None:
    tokens = TokenStream([np.arange(40, dtype=np.uint16)], seed=1, block_len=8).read(0, 40).reshape(5, 8)
    assert (tokens - tokens[:, :1] == np.arange(8)).all()
    assert tokens[:, 0].tolist() != sorted(tokens[:, 0].tolist())


def test_a_stream_needs_documents() -> None:
    with pytest.raises(ValueError, match="at least one document"):
        TokenStream([], seed=0)


def test_documents_survive_being_cut_and_tokenized() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    text = "class A:\n    def f(self):\n        return 'é'\n\n" * 40 + "<|eos|>"
    (ids,) = mixture.tokenize([text], tokenizer, seed=3)
    assert tokenizer.decode(ids) == "<|bos|>" + text
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) > len(tokenizer(text)["input_ids"])  # it was cut somewhere


def test_a_conversation_is_what_the_chat_template_writes() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    seen = set()
    for seed in range(50):
        text = mixture.conversation(FUNCTION, random.Random(seed))
        turns = text.removesuffix("<|eos|>").split("<|end|>")[:-1]
        messages = [{"role": t[2:].split("|>")[0], "content": t.split("|>", 1)[1]} for t in turns]
        assert tokenizer.apply_chat_template(messages, tokenize=False) + "<|eos|>" == "<|bos|>" + text
        seen.add(messages[-1]["content"])
    assert seen == {FUNCTION.source.rstrip(), "Add two numbers."}


def test_documents_hold_each_file_whole_and_depend_on_the_seed_alone() -> None:
    files = [SourceFile(f"m{i}.py", FUNCTION.source * (i + 1)) for i in range(20)]
    first, again, other = (list(mixture.documents(files, seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert {file.text + "<|eos|>" for file in files} <= set(first)

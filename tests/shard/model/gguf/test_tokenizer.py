"""Tokenizers of `.gguf` files: how the named kinds split texts, where texts begin, and which tokens end them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from lorikeet.shard.model.gguf import tokenizer as tokenizers
from lorikeet.shard.model.gguf.configuration import read_configuration
from lorikeet.shard.model.gguf.file import GgufFile
from lorikeet.shard.model.gguf.folder import METADATA
from lorikeet.shard.model.gguf.tokenizer import class_for, ends_of_text, read_tokenizer
from tests import tiny
from tests.shard.model.gguf.files import needs_tokenizers, write_model

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return tiny.make("llama", folder, tokenizer=True, num_hidden_layers=1)


def written(plain: Path, folder: Path, **metadata: Any) -> GgufFile:
    """A file with this metadata of its tokenizer."""
    write_model(plain, folder / "tiny.gguf", "F32", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    return GgufFile(folder / "tiny.gguf")


def read(file: GgufFile, folder: Path) -> Any:
    return read_tokenizer(folder, METADATA, file, read_configuration(folder, METADATA, file))


def pieces(tokenizer: Any, text: str) -> list[str]:
    backend = tokenizer.backend_tokenizer
    text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@needs_tokenizers
@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("llama-bpe", ["123", "45", "!"]),
        pytest.param("qwen2", ["1", "2", "3", "4", "5", "!"], marks=pytest.mark.long),
        pytest.param("smollm", ["1", "2", "3", "4", "5", "!"], marks=pytest.mark.long),
        ("gpt-2", ["12345", "!"]),
    ],
)
def test_texts_are_split_as_by_the_named_kind(split: str, words: list[str], plain: Path, tmp_path: Path) -> None:
    tokenizer = read(written(plain, tmp_path, pre=split), tmp_path)
    assert pieces(tokenizer, "12345!") == words
    assert len(pieces(tokenizer, "e\u0301")) == len(pieces(tokenizer, "\u00e9")) or split != "qwen2"
    begins = tokenizer("the").input_ids[0] == tokenizer.bos_token_id
    assert begins == (split == "llama-bpe")
    assert json.loads(tokenizer.backend_tokenizer.to_str())["model"]["ignore_merges"] == (split == "llama-bpe")


@needs_tokenizers
def test_a_flag_decides_how_texts_begin(plain: Path, tmp_path: Path) -> None:
    file = written(plain, tmp_path, pre="llama-bpe", add_bos_token=False)
    tokenizer = read(file, tmp_path)
    assert tokenizer("the").input_ids[0] != tokenizer.bos_token_id


@needs_tokenizers
def test_an_unknown_split_is_rejected(plain: Path, tmp_path: Path) -> None:
    file = written(plain, tmp_path, pre="chameleon")
    with pytest.raises(ValueError, match=r"pre-tokenizer is not supported \(tokenizer.ggml.pre chameleon\)"):
        read(file, tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_transformers_that_splits_no_texts_is_rejected(
    kind: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 5.17 has no regular expressions for the named kinds, and splits Gemma's words into letters."""
    monkeypatch.setattr(tokenizers, "SPLITS", None)
    with pytest.raises(ValueError, match=r"needs transformers 5\.18 or newer"):
        read(written(plain, tmp_path, model=kind, pre="llama-bpe"), tmp_path)


@needs_tokenizers
@pytest.mark.parametrize(("name", "architecture"), [("llama", "llama"), ("qwen3", "qwen3"), ("gemma3_text", "gemma3")])
def test_configuration_and_tokenizer_are_those_that_transformers_finds(
    name: str, architecture: str, tmp_path: Path
) -> None:
    """It reads a whole file for each of both; here the vocabulary is read once."""
    plain = tiny.make(name, tmp_path / "plain", tokenizer=True)
    write_model(plain, tmp_path / "tiny.gguf", "F32", architecture=architecture)
    file = GgufFile(tmp_path / "tiny.gguf")
    config = read_configuration(tmp_path, METADATA, file)
    assert config.to_dict() == AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf").to_dict()
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert class_for(config) is type(expected)
    tokenizer = read_tokenizer(tmp_path, METADATA, file, config)
    assert tokenizer.backend_tokenizer.get_vocab() == expected.backend_tokenizer.get_vocab()


def test_every_token_that_ends_an_answer_is_named(plain: Path, tmp_path: Path) -> None:
    ends = ends_of_text(written(plain, tmp_path, eot_token_id=7))
    assert ends == [0, 7], "the file's own end of text, then the end of a turn"

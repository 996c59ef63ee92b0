"""A draft model with another vocabulary is an error that names both models."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models import model
from lorikeet.launcher.models.model import ModelFolder

WORDS = {"a": 0, "b": 1, "c": 2}


def bpe(vocab: dict[str, int], added: dict[str, int] | None = None) -> dict[str, Any]:
    tokens = [{"content": text, "id": number} for text, number in (added or {}).items()]
    return {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": tokens}


def folder(path: Path, tokenizer: Any = None, size: int | None = 4, **files: bytes) -> ModelFolder:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({} if size is None else {"vocab_size": size}))
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, content in files.items():
        (path / name.replace("_", ".")).write_bytes(content)
    return ModelFolder(f"owner/{path.name}", path)


def refusal(*models: ModelFolder) -> str:
    with pytest.raises(LauncherError) as caught:
        model.check(*models)
    assert caught.value.exit is Exit.ARGUMENT_VALIDATION
    said = str(caught.value)
    assert all(model.id in said for model in models) and "\n" not in said
    return said


def test_equal_ids_are_the_same_tokenizer(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", bpe(WORDS, {"<end>": 3}))
    model.check(base, folder(tmp_path / "same", bpe(WORDS, {"<end>": 3})))
    model.check(base, folder(tmp_path / "shorter", {**bpe(WORDS), "normalizer": None}))
    unigrams = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0], ["c", -2.5]]}}
    model.check(base, folder(tmp_path / "unigrams", unigrams, size=None))


def test_a_different_token_of_an_id_is_an_error(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", bpe(WORDS, {"<end>": 3}))
    said = refusal(base, folder(tmp_path / "swapped", bpe({"a": 0, "c": 1, "b": 2})))
    assert said.endswith("token 1 is 'c', in the base model 'b'")
    assert "token 3 is '<stop>'" in refusal(base, folder(tmp_path / "added", bpe(WORDS, {"<stop>": 3})))


def test_a_different_number_of_ids_is_an_error(tmp_path: Path) -> None:
    larger = folder(tmp_path / "draft", bpe({**WORDS, "d": 3}), size=4)
    said = refusal(folder(tmp_path / "base", bpe(WORDS), size=3), larger)
    assert said.endswith("it has 4 token ids, the base 3")


def test_padding_rows_are_not_ids(tmp_path: Path) -> None:
    """As in families whose larger members have wider output heads."""
    base = folder(tmp_path / "base", bpe(WORDS), size=128)
    model.check(base, folder(tmp_path / "draft", {**bpe(WORDS), "normalizer": None}, size=64))
    model.check(base, folder(tmp_path / "bare", size=64), folder(tmp_path / "named", bpe(WORDS)))


def test_older_vocabulary_files_are_compared_byte_by_byte(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", bpe(WORDS), tokenizer_model=b"pieces")
    model.check(base, folder(tmp_path / "same", tokenizer_model=b"pieces"))
    refusal(base, folder(tmp_path / "other", tokenizer_model=b"others"))
    refusal(base, folder(tmp_path / "none"))


def test_the_tokenizer_of_draft_tokenizer_id_is_compared_too(tmp_path: Path) -> None:
    base, bare = folder(tmp_path / "base", bpe(WORDS)), folder(tmp_path / "bare")
    same, other = folder(tmp_path / "same", bpe(WORDS)), folder(tmp_path / "other", bpe({"b": 0}))
    model.check(base, bare, same)
    assert "its tokenizer owner/other differs" in refusal(base, bare, other)
    assert "its tokenizer owner/other differs" in refusal(base, same, other)
    with pytest.raises(LauncherError, match="owner/other cannot be a draft model for owner/base"):
        model.check(base, other, same)  # the draft model's own files are unchanged


@pytest.mark.parametrize("text", ["", "[]", '{"model": {"vocab": 3}}', '{"model": {"vocab": [1]}}'])
def test_a_broken_file_is_an_error(tmp_path: Path, text: str) -> None:
    base, draft = folder(tmp_path / "base", bpe(WORDS)), folder(tmp_path / "draft")
    (draft.path / "tokenizer.json").write_text(text)
    with pytest.raises(LauncherError, match=r"tokenizer\.json cannot be read"):
        model.check(base, draft)

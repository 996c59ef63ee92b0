"""Prompts in every format, and texts of a run that was stopped and resumed."""

import json
from pathlib import Path

import pytest

from lorikeet.adapters.errors import HeadsError
from lorikeet.adapters.medusa import texts
from lorikeet.adapters.medusa.target import Target
from lorikeet.adapters.medusa.texts import TextStore, Writing
from tests.adapters.medusa import small

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}. {% endfor %}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small.target(small.base(tmp_path_factory.mktemp("base")))


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "one\n\n{two}\n  three\n", ["one", "{two}", "  three"]),
        ("p.jsonl", '{"prompt": "a\\nb"}\n\n{"inputs": "c"}\n"d"\n', ["a\nb", "c", "d"]),
        ("p.jsonl", json.dumps({"messages": MESSAGES, "id": 7}), [MESSAGES]),
        ("p.json", json.dumps(["a", {"prompt": "b"}, {"messages": MESSAGES}]), ["a", "b", MESSAGES]),
    ],
)
def test_formats(tmp_path: Path, name: str, content: str, prompts: list[object]) -> None:
    (tmp_path / name).write_text(content)
    assert texts.read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.txt", b" \n\n", "is empty"),
        ("p.json", b"", "is empty"),
        ("p.json", b"[]", "is empty"),
        ("p.json", b'{"prompt": "a"}', "not a JSON list"),
        ("p.jsonl", b'"a"\n{oops}\n', "not JSON at line 2"),
        ("p.jsonl", b'"a"\n\n{"text": "b"}\n', "an invalid entry 3"),
        ("p.jsonl", b'{"messages": []}', "an invalid entry 1"),
        ("p.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadsError, match=sentence):
        texts.read_prompts(tmp_path / name)


def test_messages_go_through_the_chat_template(target: Target) -> None:
    target.tokenizer.chat_template = None
    with pytest.raises(HeadsError, match="neither base nor adapter has a chat template"):
        texts.encode_prompts([MESSAGES], target.tokenizer)
    target.tokenizer.chat_template = TEMPLATE
    (prompt,) = texts.encode_prompts([MESSAGES], target.tokenizer)
    assert target.tokenizer.decode(prompt.ids) == "<|endoftext|>hello. "
    assert prompt.inputs is not None
    assert tuple(target.tokenizer(prompt.inputs)["input_ids"]) == prompt.ids


def writing(batch_size: int = 2, num: int = 6) -> Writing:
    return Writing(num, batch_size, lambda done, of: None)


def test_a_resumed_run_generates_only_missing_texts(target: Target, tmp_path: Path) -> None:
    encoded = texts.encode_prompts(small.PROMPTS, target.tokenizer)
    settings = texts.settings_of(target, encoded, 6)
    path = tmp_path / "texts.jsonl"
    store = TextStore(path, settings)
    texts.write_with_target(target, encoded, store, writing())
    store.close()
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:7])  # stopped within a line
    again = TextStore(path, settings)
    assert len(again.outputs) == 2
    asked = []
    plain = target.write
    target.write = lambda batch, *rest: asked.append(len(batch)) or plain(batch, *rest)
    texts.write_with_target(target, encoded, again, writing())
    again.close()
    target.write = plain
    assert asked == [2, 2]
    assert path.read_text() == whole
    assert texts.texts(encoded, again) == texts.texts(encoded, store)
    assert len(texts.texts(encoded, store)) == len(small.PROMPTS)


def test_texts_of_another_run_are_rejected(target: Target, tmp_path: Path) -> None:
    encoded = texts.encode_prompts(small.PROMPTS, target.tokenizer)
    TextStore(tmp_path / "t.jsonl", texts.settings_of(target, encoded, 6)).close()
    with pytest.raises(HeadsError, match=r"texts of another run \(other length\): use another --work"):
        TextStore(tmp_path / "t.jsonl", texts.settings_of(target, encoded, 7))
    with pytest.raises(HeadsError, match=r"other prompts"):
        TextStore(tmp_path / "t.jsonl", texts.settings_of(target, encoded[1:], 6))


def test_prompts_that_leave_no_room_are_left_out(target: Target) -> None:
    encoded = texts.encode_prompts(["short", "hello " * 300], target.tokenizer)
    assert texts.fitting(encoded, target, 20) == encoded[:1]
    with pytest.raises(HeadsError, match="no prompt leaves room for 128 tokens in the model's 128 positions"):
        texts.fitting(encoded, target, 128)


def test_a_target_samples_prompts(target: Target) -> None:
    prompts = texts.own_prompts(target, 5, batch_size=4, seed=3)
    assert len({prompt.ids for prompt in prompts}) == 5
    assert prompts == texts.own_prompts(target, 5, batch_size=4, seed=3)
    assert prompts != texts.own_prompts(target, 5, batch_size=4, seed=4)

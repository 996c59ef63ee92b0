"""The tokenizer of a model folder: special tokens, end-of-text ids, offsets, and threads."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.tokenizer import SHORT_CONVERSATION, SHORT_TEXT, Tokenizer
from tests.router.text.vocabularies import byte_level, sentencepiece_like

BOS, EOS, TURN = 0, 1, 2


def load(folder: Path, settings: dict[str, Any] | None = None, **fields: Any) -> Tokenizer:
    byte_level().save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **(settings or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return Tokenizer.load(RouterConfig("model", str(folder), ("unix:none",), **fields))


def ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    return asyncio.run(tokenizer.encode(text, add_special_tokens))


def test_plain_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert ids(tokenizer, "the fox") == byte_level().encode("the fox").ids
    assert ids(tokenizer, "") == []
    assert tokenizer.token_text(ids(tokenizer, " the")[0]).startswith(" ")
    assert {BOS, EOS, TURN} <= tokenizer.special_ids


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, False)])
def test_the_configuration_overrides_special_tokens(tmp_path: Path, bos: bool, eos: bool) -> None:
    tokenizer = load(tmp_path, {"add_bos_token": bos, "add_eos_token": eos})
    plain = ids(tokenizer, "the fox", add_special_tokens=False)
    assert ids(tokenizer, "the fox") == [BOS] * bos + plain + [EOS] * eos


def test_eos_ids_of_the_generation_configuration_and_the_tokenizer(tmp_path: Path) -> None:
    assert load(tmp_path).eos_ids == {EOS}
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load(tmp_path).eos_ids == {EOS, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load(tmp_path).eos_ids == {EOS, 2, 5}


def test_offsets_count_characters(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    text = "größe 日本 fox"
    offsets = asyncio.run(tokenizer.pool.run(lambda: tokenizer.offsets(text, True), "", 1))
    assert [token_id for token_id, *_ in offsets] == ids(tokenizer, text)
    assert offsets[0][1:] == ("größe", 0, 5)
    assert offsets[-1][3] == len(text)


def test_declared_tokens_are_added(tmp_path: Path) -> None:
    declared = {"added_tokens_decoder": {"900": {"content": "<|late|>", "special": True}}}
    tokenizer = load(tmp_path, declared)
    assert len(ids(tokenizer, "<|late|>")) == 1
    assert ids(tokenizer, "<|late|>")[0] in tokenizer.special_ids


def test_tokenizing_does_not_block_the_event_loop(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, validation_workers=1)

    async def main() -> tuple[int, int]:
        long = asyncio.create_task(tokenizer.encode("the lazy dog " * 100_000))
        num_turns = 0
        while not long.done():
            num_turns += 1
            await asyncio.sleep(0.001)
        return num_turns, len(await long)

    num_turns, num_tokens = asyncio.run(main())
    assert num_turns > 20  # it is one or two where tokenizing holds the GIL
    assert num_tokens > 100_000
    assert any(thread.name.startswith("tokenize") for thread in threading.enumerate())
    tokenizer.close()


def test_chat(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    silent = load(tmp_path)
    assert silent.template_source is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        asyncio.run(silent.render_chat(messages))
    speaking = load(tmp_path, {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"})
    assert speaking.template_source is not None
    assert asyncio.run(speaking.render_chat(messages)).text == "<s>hi</s>"


SAID = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"text": "x" * 100_000}}}


@pytest.mark.parametrize(
    ("messages", "waits"),
    [
        ([SAID], False),
        ([SAID] * SHORT_CONVERSATION, False),
        ([SAID] * (SHORT_CONVERSATION + 1), True),
        ([{"role": "user", "content": "x" * SHORT_TEXT}], False),
        ([{"role": "user", "content": "x" * (SHORT_TEXT + 1)}], True),
        ([SAID, {"role": "assistant", "content": "", "tool_calls": [CALL]}], True),
        ([SAID, {"role": "assistant", "content": "", "reasoning_content": "x" * 100_000}], True),
        ([SAID, {"role": "tool", "content": None}], True),
    ],
    ids=["one", "few", "many", "short", "long", "a call", "reasoning", "no text"],
)
def test_only_short_conversations_take_the_event_loop(tmp_path: Path, messages: list[Any], waits: bool) -> None:
    tokenizer = load(tmp_path, {"chat_template": "{{ messages | tojson }}"})
    asyncio.run(tokenizer.render_chat([SAID]))  # compiles the template
    jobs, run = list[int](), tokenizer.pool.run

    async def counted(work: Any, caller: str, num_chars: int) -> Any:
        jobs.append(num_chars)
        return await run(work, caller, num_chars)

    tokenizer.pool.run = counted  # type: ignore[method-assign]
    assert asyncio.run(tokenizer.render_chat(messages)).text
    assert bool(jobs) == waits
    tokenizer.close()


def test_the_template_of_another_file(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"chat_template": "other {{ messages[0].content }}"}')
    tokenizer = load(tmp_path, {"chat_template": "own"}, tokenizer_config_path=str(other))
    assert asyncio.run(tokenizer.render_chat([{"role": "user", "content": "hi"}])).text == "other hi"


def test_a_folder_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.load(RouterConfig("model", str(tmp_path), ("unix:none",)))


def test_prompts_with_a_space_mark(tmp_path: Path) -> None:
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(RouterConfig("model", str(tmp_path), ("unix:none",)))
    assert [tokenizer.token_text(token_id) for token_id in ids(tokenizer, "the fox")] == [" the", " fox"]

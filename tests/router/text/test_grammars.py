"""Grammars are checked in processes: refusals name the reason, and what takes long fails alone."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models

from lorikeet.proto.grammars import grammar_tokenizer, read_grammar_tokenizer
from lorikeet.router.errors import Overloaded, ValidationError
from lorikeet.router.text import grammar_process
from lorikeet.router.text import grammars as grammars_module
from lorikeet.router.text.grammars import Grammars

pytestmark = pytest.mark.anyio
MODEL = Path(__file__).parents[3] / "demo" / "base"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{{{number}}}"} for number in range(300)]}
"""The library's limits do not end its check."""
REFUSED: list[tuple[str, Any, str]] = [
    ("json_schema", {"not": {"type": "string"}}, "not"),
    ("json_schema", {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ("json_schema", {"type": "nonsense"}, "nonsense"),
    ("json_schema", {"type": "integer", "multipleOf": 99991, "minimum": 3, "maximum": 10**15}, "too many expressions"),
    ("regex", "(a", "(a"),
    ("grammar", "start: nowhere", "nowhere"),
]
CHOICES = (
    [f"{number:05d} {'y' * 40}" for number in range(4096)],
    ["a", "ab", "abc"],
    ['say "x"', "a\\b", "new\nline", "tab\t", "\x7f\x01", "é€😀\u2028", "/a/", "%a{1}"],
)


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run next to these."""
    monkeypatch.setattr(grammars_module, "FAST_S", 120.0)
    monkeypatch.setattr(grammars_module, "QUEUE_S", 60.0)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - several conditions
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serializing() -> AsyncIterator[Grammars]:
    grammars = Grammars(MODEL)
    try:
        yield grammars
    finally:
        grammars.close()


async def test_what_the_library_refuses_is_named() -> None:
    """A schema cannot weaken the guarantee with options of its own."""
    async with serializing() as grammars:
        for kind, value, words in REFUSED:
            with pytest.raises(ValidationError, match=re.escape(words)) as rejected:
                await grammars.serialize(kind, value, "guided_json", "someone")
            assert "`guided_json` is not supported: " in str(rejected.value)


async def test_a_grammar_is_checked_once() -> None:
    async with serializing() as grammars:
        first = await grammars.serialize("json_schema", SCHEMA, "guided_json", "someone")
        assert await grammars.serialize("json_schema", SCHEMA, "response_format", "someone") is first
        assert "whitespace_pattern" in first


@pytest.mark.parametrize("texts", CHOICES, ids=["many", "prefixes", "letters"])
async def test_every_choice_can_be_chosen(texts: list[str]) -> None:
    async with serializing() as grammars:
        grammar = await grammars.serialize("choice", texts, "guided_choice", "someone")
    tokenizer = read_grammar_tokenizer(MODEL)
    for text in texts[:50]:
        matcher = LLMatcher(tokenizer, grammar)
        assert matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()
        assert not matcher.validate_tokens(tokenizer.tokenize_str("?"))


async def test_a_check_that_takes_long_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile others are checked, and no more than some of one caller go on."""
    monkeypatch.setattr(grammars_module, "FAST_S", 3.0)
    monkeypatch.setattr(grammars_module, "SLOW_S", 1.0)
    async with serializing() as grammars:
        slow = [
            asyncio.create_task(grammars.serialize("json_schema", ENDLESS, "guided_json", "slow")) for _ in range(3)
        ]
        for number in range(3):
            assert await grammars.serialize("regex", f"a{{{number}}}", "guided_regex", "other")
        failures = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(failure, Overloaded | ValidationError) for failure in failures)
        assert len(grammars._idle) <= grammars_module.NUM_FAST and not grammars._slow
        assert grammars._num_fast == 0


async def test_slow_checks_of_one_caller_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "FAST_S", 0.1)
    monkeypatch.setattr(grammars_module.Checker, "answer", lambda _: asyncio.Event().wait())
    async with serializing() as grammars:
        texts = [f"a{{{number}}}" for number in range(9)]
        callers = [*"aaabbbccc"]
        checks = [
            asyncio.create_task(grammars.serialize("regex", text, "guided_regex", caller))
            for text, caller in zip(texts, callers, strict=True)
        ]
        for check in asyncio.as_completed(checks):
            with pytest.raises(Overloaded):
                await check
            if grammars._slow.total() == grammars_module.MAX_SLOW:
                break
        await until(lambda: sum(check.done() for check in checks) == 3)
        assert [grammars._slow[caller] for caller in "abc"] == [2, 2, 2]
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)


async def test_processor_time_is_limited() -> None:
    async with serializing() as grammars:
        with pytest.raises(ValidationError, match="`guided_json` is too complex: checking it takes more than 1 s"):
            await grammars.serialize("json_schema", ENDLESS, "guided_json", "slow")


async def test_callers_of_slow_checks_step_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "FAST_S", 0.1)
    monkeypatch.setattr(grammars_module, "SLOW_S", 0.5)
    async with serializing() as grammars:
        with pytest.raises((Overloaded, ValidationError)):
            await grammars.serialize("json_schema", ENDLESS, "guided_json", "slow")
        monkeypatch.setattr(grammars_module, "FAST_S", 120.0)
        monkeypatch.setattr(grammars_module, "SLOW_S", 120.0)
        stepped = list[int]()
        monkeypatch.setattr(grammars_module.Checker, "step_back", lambda self: stepped.append(self._pid))
        for number, caller in enumerate(("other", "slow", "other")):
            assert await grammars.serialize("regex", f"b{{{number}}}", "guided_regex", caller)
        assert len(stepped) == 1


async def test_processes_that_ended_are_replaced() -> None:
    async with serializing() as grammars:
        await grammars.serialize("regex", "a", "guided_regex", "someone")
        (idle,) = grammars._idle
        os.kill(idle._pid, signal.SIGKILL)
        await until(lambda: idle.has_ended)
        assert await grammars.serialize("regex", "b", "guided_regex", "someone")
        parent = grammars._checkers._process
        assert parent is not None
        parent.kill()
        parent.wait()
        await until(lambda: grammars._idle[0].has_ended)
        assert await grammars.serialize("regex", "c", "guided_regex", "someone")


async def test_processes_without_checks_end_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "IDLE_S", 0.2)
    async with serializing() as grammars:
        await grammars.serialize("regex", "a", "guided_regex", "someone")
        (idle,) = grammars._idle
        assert grammars._checkers.is_running and not idle.has_ended
        both = (grammars.serialize("regex", text, "guided_regex", text) for text in "bc")
        assert all(await asyncio.gather(*both)), "a check keeps them"
        async with asyncio.timeout(30):
            await until(lambda: not grammars._checkers.is_running)
        assert not grammars._idle
        assert await grammars.serialize("regex", "d", "guided_regex", "someone")


async def test_a_caller_that_leaves_ends_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "FAST_S", 0.1)
    async with serializing() as grammars:
        await grammars.serialize("regex", "a", "guided_regex", "someone")
        check = asyncio.create_task(grammars.serialize("json_schema", ENDLESS, "guided_json", "slow"))
        await until(lambda: bool(grammars._slow))
        check.cancel()
        with pytest.raises(asyncio.CancelledError):
            await check
        assert not grammars._slow and grammars._num_fast == 0


async def test_requests_of_a_caller_share_the_check_of_one_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once are no reason to reject them, however slow it is; each may leave."""
    monkeypatch.setattr(grammars_module, "FAST_S", 0.0)
    async with serializing() as grammars:
        asked = [asyncio.create_task(grammars.serialize("regex", "a+", "guided_regex", "someone")) for _ in range(20)]
        await until(lambda: bool(grammars._running))
        asked[0].cancel()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert len({str(error) for error in results[1:]}) == 1 and "a+" in str(results[1])
        assert not grammars._running and not grammars._slow


async def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    grammars = Grammars(tmp_path)
    with pytest.raises(ValidationError, match="tokenizer cannot be used"):
        await grammars.serialize("regex", "a", "guided_regex", "someone")


def test_a_panic_of_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As a panic of the library: no subclass of Exception."""

    def panic(_: Any) -> str:
        raise Panic("parser stopped")

    monkeypatch.setitem(grammar_process.MAKERS, "regex", panic)
    tokenizer = read_grammar_tokenizer(MODEL)
    assert grammar_process.check(tokenizer, "regex", "a") == {"error": "parser stopped"}


def test_a_grammar_names_added_tokens_and_special_tokens() -> None:
    """An added token is text, so that one token and its letters match; a special token is that token alone."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "<": 1, "x": 2, ">": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("<xa>", special=False)])
    tokenizer = grammar_tokenizer(backend.to_str(), 8, [4])
    answer = grammar_process.check(tokenizer, "grammar", 'start: <xa> "<xa>" /<xa>/ <s> // <xa>')
    for texts in (["<xa>", "<xa>", "<xa>"], ["<xa>", "<", "x", "a", ">", "<xa>"]):
        matcher = LLMatcher(tokenizer, answer["grammar"], log_level=0)
        ids = [backend.token_to_id(text) for text in [*texts, "<s>"]]
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert "unknown special token" in grammar_process.check(tokenizer, "grammar", "start: <ax>")["error"]


async def test_results_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grammars_module, "MAX_KEPT_BYTES", 1000)
    kept = Grammars(tmp_path)
    for number in range(100):
        kept._keep(bytes([number]), {"grammar": "x" * 100})
    assert list(kept._kept) == [bytes([97]), bytes([98]), bytes([99])]
    assert kept._num_bytes <= 1000
    kept.close()

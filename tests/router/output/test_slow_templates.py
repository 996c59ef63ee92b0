"""Response templates whose regular expressions are slow delay one another only."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from lorikeet.router.adapters.chat_templates import ChosenTemplate
from lorikeet.router.output.outputs import OutputPreparer, Prepared
from lorikeet.router.requests.request import FinishReason
from lorikeet.router.schemas.chat import NO_TOOLS, Conversation
from lorikeet.router.text.chat_template import NO_OPTIONS, Rendered

pytestmark = pytest.mark.anyio


def template(**close: str) -> dict[str, Any]:
    fields = {"reasoning": {"open": "<r>", **close}, "content": {}}
    return {"start_anchor_pattern": r"\A", "fields": fields}


SLOW, PLAIN = template(close_pattern="(?:a|a)+$"), template(close="</r>")


class Templates:
    """Each adapter's response template, without files."""

    def __init__(self) -> None:
        self.chosen: ChosenTemplate

    async def choose(self, *arguments: Any, **options: Any) -> ChosenTemplate:
        return self.chosen

    async def render(self, *arguments: Any) -> Rendered:
        return Rendered("Hello")


@pytest.fixture
async def outputs() -> AsyncIterator[OutputPreparer]:
    vocabulary = SimpleNamespace(raw=lambda token_id: "")
    tokenizer: Any = SimpleNamespace(vocabulary=vocabulary, special_ids=(), eos_ids=(1,))
    templates: Any = Templates()
    made = OutputPreparer(templates, tokenizer)
    yield made
    await made.close()


async def prepared(outputs: OutputPreparer, template: dict[str, Any], owner: str) -> Prepared:
    templates: Any = outputs._templates
    templates.chosen = ChosenTemplate("chat", owner, template, owner)
    return await outputs.prepare(None, Conversation([], NO_OPTIONS), NO_TOOLS, None, "caller")


async def read_slowly(outputs: OutputPreparer, owner: str) -> None:
    reader = (await prepared(outputs, SLOW, owner)).reader()
    await reader.read("<r>" + "a" * 40 + "!", None)


@pytest.mark.long
async def test_a_slow_template_is_parsed_apart_from_then_on(outputs: OutputPreparer) -> None:
    await read_slowly(outputs, "eve|hub:eve")
    assert outputs.slow_parser.pid is None
    await read_slowly(outputs, "eve|hub:eve")
    assert outputs.slow_parser.pid is not None


async def test_others_do_not_wait_for_a_slow_template(outputs: OutputPreparer) -> None:
    """The process of slow templates stands still meanwhile."""
    await read_slowly(outputs, "eve|hub:eve")
    await read_slowly(outputs, "eve|hub:eve")
    assert outputs.slow_parser.pid is not None
    os.kill(outputs.slow_parser.pid, signal.SIGSTOP)
    slow = asyncio.create_task(read_slowly(outputs, "eve|hub:eve"))
    try:
        async with asyncio.timeout(60):
            reader = (await prepared(outputs, PLAIN, "bob|hub:bob")).reader()
            events = await reader.read("<r>why</r>yes", FinishReason.EOS_TOKEN)
        assert [type(event).__name__ for event in events] == ["ReasoningDelta", "ContentDelta", "Finish"]
        assert not slow.done()
    finally:
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)

"""The parser's process: many outputs at once, the loss of the process, and outputs that end it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lorikeet.router.output.events import ContentDelta, Finish, FinishKind, Message
from lorikeet.router.output.formats import format_of
from lorikeet.router.output.reader import ParsedReader, ParserFailed, ParserProcess
from lorikeet.router.requests.request import FinishReason
from tests.router.output.test_parser_worker import HERMES, PARIS, TOOLS

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def process(anyio_backend: str) -> AsyncIterator[ParserProcess]:
    made = ParserProcess()
    yield made
    await made.close()


Pause = tuple[asyncio.Semaphore, asyncio.Event]


def template() -> dict[str, Any]:
    tool_format = format_of(HERMES)
    assert tool_format is not None
    return tool_format.template


def output(number: int) -> str:
    city = json.dumps({"name": "weather", "arguments": {"city": f"City {number}"}})
    return f"Text {number}.\n<tool_call>{city}</tool_call>\n<tool_call>{PARIS}</tool_call>\nEnd {number}."


async def read(process: ParserProcess, text: str, size: int, pause: Pause | None = None) -> Message:
    """An output that arrives in parts; where `pause` is given it waits in its middle."""
    reader, message = ParsedReader(process, process.open(template(), "", TOOLS)), Message()
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    for index, part in enumerate(parts):
        if pause is not None and index == len(parts) // 2:
            pause[0].release()
            await pause[1].wait()
        message.add(await reader.read(part, FinishReason.EOS_TOKEN if index + 1 == len(parts) else None))
    return message


def seen(message: Message) -> tuple[str, list[str], FinishKind]:
    return message.content, [call.arguments for call in message.tool_calls], message.finish.kind


def expected(number: int) -> tuple[str, list[str], FinishKind]:
    calls = [f'{{"city": "City {number}"}}', '{"city": "Paris"}']
    return f"Text {number}.\nEnd {number}.", calls, FinishKind.TOOL_CALLS


async def test_outputs_at_once_are_parsed_each(process: ParserProcess) -> None:
    messages = await asyncio.gather(*(read(process, output(number), number % 7 + 1) for number in range(40)))
    assert [seen(message) for message in messages] == [expected(number) for number in range(40)]


async def test_texts_of_one_turn_are_one_batch(process: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    exchange = process.exchange

    async def counting(line: bytes, seconds: float) -> bytes:
        sizes.append(len(json.loads(line)["jobs"]))
        return await exchange(line, seconds)

    monkeypatch.setattr(process, "exchange", counting)
    parses = [process.open(template(), "", TOOLS) for _ in range(20)]
    await asyncio.gather(*(process.parse(parse, "text", is_last=True) for parse in parses))
    assert [size for size in sizes if size] == [20]


async def test_a_process_that_is_killed_loses_nothing(process: ParserProcess) -> None:
    """All outputs are in their middle, some of them within a call."""
    resume, waiting = asyncio.Event(), asyncio.Semaphore(0)
    reading = [
        asyncio.create_task(read(process, output(number), number % 5 + 1, (waiting, resume))) for number in range(20)
    ]
    for _ in reading:
        await waiting.acquire()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    resume.set()
    messages = await asyncio.gather(*reading)
    assert [seen(message) for message in messages] == [expected(number) for number in range(20)]


@pytest.mark.long
async def test_only_the_output_that_ends_the_process_is_given_up(
    process: ParserProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text becomes content as it was written; the others are parsed."""
    from lorikeet.router.output import reader

    monkeypatch.setattr(reader.ParserProcess, "command", (sys.executable, "-c", _FRAGILE))
    fragile = ParserProcess()
    try:
        text = "Before. <tool_call>CRASH</tool_call> after"
        messages = await asyncio.gather(
            *(read(fragile, output(number), 9) for number in range(3)), read(fragile, text, 5)
        )
    finally:
        await fragile.close()
    assert [seen(message) for message in messages[:3]] == [expected(number) for number in range(3)]
    assert seen(messages[3]) == (text, [], FinishKind.STOP)


_FRAGILE = """
import os, sys
from lorikeet.router.output import parser_worker
run = parser_worker.Worker._run
def fragile(self, job):
    self.texts = getattr(self, "texts", {})
    self.texts[job["id"]] = self.texts.get(job["id"], "") + "".join(job["texts"])
    if "CRASH" in self.texts[job["id"]]:
        os._exit(1)
    return run(self, job)
parser_worker.Worker._run = fragile
parser_worker.main()
"""


async def test_an_output_that_nobody_reads_any_more_is_dropped(process: ParserProcess) -> None:
    parse = process.open(template(), "", TOOLS)
    await process.parse(parse, "text")
    process.drop(parse)
    process.drop(parse)
    assert process._dropped == [parse.number]


async def test_a_response_template_that_is_not_valid_fails(process: ParserProcess) -> None:
    with pytest.raises(ParserFailed, match="must be a non-empty dict"):
        await process.parse(process.open({"start_anchor": "x"}, "", []), "")
    with pytest.raises(ParserFailed, match="not valid JSON"):
        process.open({"start_anchor": "\ud800"}, "", [])


async def test_an_output_that_is_given_up_goes_on_as_content(process: ParserProcess) -> None:
    parse = process.open(template(), "", TOOLS)
    reader = ParsedReader(process, parse)
    assert await reader.read("Hi <tool_", None) == [ContentDelta("Hi")]
    parse.opening = process.open({"start_anchor": "x"}, "", []).opening
    parse.epoch = -1
    assert await reader.read("call>{", None) == [ContentDelta(" <tool_call>{")]
    assert await reader.read("}", FinishReason.LENGTH) == [ContentDelta("}"), Finish(FinishKind.LENGTH)]

"""langchain-openai, unmodified: `bind_tools`, and `with_structured_output` in all three methods."""

import asyncio
import json
from pathlib import Path

import pytest

from lorikeet.proto import shard_pb2
from tests.package_environments import installed
from tests.router.api import langchain_client
from tests.router.api.routes.test_tools import TEMPLATE
from tests.router.scripted_shard import Script
from tests.router.serving import EOS, serving

pytestmark = [pytest.mark.anyio, pytest.mark.long]

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_tools_and_structured_output(tmp_path: Path, anyio_backend: str) -> None:
    python = await asyncio.to_thread(installed, "langchain", ["langchain-openai==1.7.4"])
    async with serving(tmp_path, chat_template=TEMPLATE) as server:

        def answer(submit: shard_pb2.Submit) -> Script:
            """JSON where the grammar is one of the text alone, else a call."""
            is_text = submit.grammar.text and "tool_call" not in submit.grammar.text
            return Script([*server.ids('{"city": "Paris"}' if is_text else CALL), EOS])

        server.shard.answer = answer
        process = await asyncio.create_subprocess_exec(
            python, langchain_client.__file__, f"{server.url}/v1", stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    assert process.returncode == 0
    paris = {"city": "Paris"}
    assert json.loads(output) == {
        "call": [["Weather", paris]],
        "streamed": [["Weather", paris]],
        "second": ["Weather"],
        "function_calling": paris,
        "json_schema": paris,
        "json_mode": paris,
    }

"""The process that renders the chat templates of adapters, as the router's event loop uses it.

Jinja's sandbox restricts what a template may access, but not its time and memory; a process can be killed.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import orjson
import structlog

from lorikeet.router.text.templates.chat_template import NO_OPTIONS, TemplateOptions

log = structlog.get_logger()

START_SECONDS = 20.0
MAX_LINE_BYTES = 64 << 20
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
_COMMAND = (sys.executable, "-m", "lorikeet.router.text.templates.template_worker")


class ProcessEnded(Exception):
    """The process ended while it rendered."""


class TemplateProcess:
    """One process, started on demand and again after it was killed; it renders one prompt at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def answer(self, question: bytes, seconds: float) -> dict[str, Any]:
        """The answer to a line of JSON, with `text` and `unread` or with `error`.

        Raises TimeoutError after `seconds`, and ProcessEnded; either way the next call starts another process.
        """
        await self.start()
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(seconds):
                return await _ask(process, question)
        except BaseException:
            await self.close()  # a late answer must not be taken for the next one
            raise

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def start(self) -> None:
        """Start the process where it does not run. Raises RuntimeError where it does not start twice in a row."""
        if self._process is not None and self._process.returncode is None:
            return
        if not await self._try_start() and not await self._try_start():
            raise RuntimeError("the process for chat templates does not start")

    async def _try_start(self) -> bool:
        """Start the process. Returns False if it ends or does not answer, and logs its exit status."""
        began = time.monotonic()
        self._process = process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            limit=MAX_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await _ask(process, question_of("", {}, [], NO_OPTIONS))
        except (TimeoutError, ProcessEnded):
            await self.close()
            seconds = round(time.monotonic() - began, 3)
            log.warning("template_process_not_started", exit_status=process.returncode, seconds=seconds)
            return False
        except BaseException:
            await self.close()
            raise
        return True


async def _ask(process: asyncio.subprocess.Process, question: bytes) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(question + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
    except (OSError, RuntimeError) as error:  # uvloop's for a pipe that is closed is a RuntimeError
        raise ProcessEnded from error
    if not line.endswith(b"\n"):
        raise ProcessEnded
    answer: dict[str, Any] = orjson.loads(line)
    return answer


def question_of(
    template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]], options: TemplateOptions
) -> bytes:
    """The line of JSON that asks for a prompt."""
    question = {"template": template, "special_tokens": special_tokens, "messages": messages, **asdict(options)}
    return json.dumps(question).encode()  # not orjson, which takes no large integers

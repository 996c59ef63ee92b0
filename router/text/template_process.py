"""Renders the chat templates of adapters in a separate process, with limits on time and memory.

Jinja's sandbox restricts what a template may access, but not its time and memory; a process can be killed. Run as
`python -m lorikeet.router.text.template_process`, it answers each line of JSON with another until its input ends.
"""

import asyncio
import contextlib
import json
import os
import resource
import sys
from dataclasses import asdict
from typing import Any

from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.chat_template import NO_OPTIONS, ChatTemplate, Rendered, TemplateOptions

SECONDS = 2.0
"""Time limit of one prompt."""
START_SECONDS = 20.0
MAX_LINE_BYTES = 64 << 20
MAX_PROMPT = 8 << 20
_MAX_MEMORY = 1 << 30
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")


class TemplateProcess:
    """One process, started on demand and again after it was killed; it renders one prompt at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def render(
        self,
        template: str,
        special_tokens: dict[str, str],
        messages: list[dict[str, Any]],
        options: TemplateOptions = NO_OPTIONS,
    ) -> Rendered:
        """The prompt. Raises ChatTemplateError."""
        question = _question(template, special_tokens, messages, options)
        async with self._lock:
            process = self._process or await self._start()
            try:
                async with asyncio.timeout(SECONDS):
                    answer = await self._ask(process, question)
            except BaseException as error:
                # A late answer must not be taken for that of the next prompt.
                await self.close()
                if isinstance(error, TimeoutError):
                    raise ChatTemplateError(f"the adapter's template took longer than {SECONDS:g} s") from None
                if isinstance(error, OSError | ValueError):
                    raise ChatTemplateError("the adapter's template needs too much memory") from None
                raise
        if "error" in answer:
            raise ChatTemplateError(str(answer["error"])[:1000])
        return Rendered(str(answer["text"]), tuple(answer["unread"]))

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lorikeet.router.text.template_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            limit=MAX_LINE_BYTES,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._ask(process, _question("", {}, [], NO_OPTIONS))
        except BaseException:
            await self.close()
            raise
        return process

    async def _ask(self, process: asyncio.subprocess.Process, question: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        answer: dict[str, Any] = json.loads(await process.stdout.readline())  # ValueError at the end of the process
        return answer


def _question(
    template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]], options: TemplateOptions
) -> dict[str, Any]:
    return {"template": template, "special_tokens": special_tokens, "messages": messages, **asdict(options)}


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        try:
            template = ChatTemplate(question["template"], question["special_tokens"])
            options = TemplateOptions(question["variables"], question["continue_final_message"])
            text, unread = template.render(question["messages"], options), template.unread(options.variables)
            answer = (
                {"text": text, "unread": unread} if len(text) <= MAX_PROMPT else {"error": "the prompt is too long"}
            )
        except ChatTemplateError as error:
            answer = {"error": error.message}
        except MemoryError:
            answer = {"error": "the template needs too much memory"}
        except Exception as error:  # a template may raise anything
            answer = {"error": type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

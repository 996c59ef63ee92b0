"""Chat templates that came with an adapter, rendered in a process of their own: what they do wrong ends there.

The sandbox keeps a template from the machine, but not from time and memory; a process can be ended. Run as
`python -m lorikeet.router.text.outside`, it answers one JSON line with another until its input ends.
"""

import asyncio
import contextlib
import json
import os
import resource
import sys
from typing import Any

from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.text.chat_template import ChatTemplate

SECONDS = 2.0
"""So long one prompt may take."""
START_SECONDS = 20.0
LONGEST_LINE = 64 << 20
LONGEST_PROMPT = 8 << 20
_MEMORY = 1 << 30
_KEPT = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")


class OutsideTemplates:
    """One process, started when first needed and after each that was ended; one prompt at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]]) -> str:
        """The prompt. Raises ChatTemplateError."""
        question = {"template": template, "special_tokens": special_tokens, "messages": messages}
        async with self._turn:
            process = self._process or await self._start()
            try:
                async with asyncio.timeout(SECONDS):
                    answer = await self._ask(process, question)
            except BaseException as error:
                # Whatever it was, an answer that nobody waits for any more must not be taken for the next one's.
                await self.close()
                if isinstance(error, TimeoutError):
                    raise ChatTemplateError(f"the adapter's template took longer than {SECONDS:g} s") from None
                if isinstance(error, OSError | ValueError | EOFError):
                    raise ChatTemplateError("the adapter's template needs too much memory") from None
                raise
        if "error" in answer:
            raise ChatTemplateError(str(answer["error"])[:1000])
        return str(answer["text"])

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lorikeet.router.text.outside",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            limit=LONGEST_LINE,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._ask(process, {"template": "", "special_tokens": {}, "messages": []})
        except BaseException:
            await self.close()
            raise
        return process

    async def _ask(self, process: asyncio.subprocess.Process, question: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        try:
            template = ChatTemplate(question["template"], question["special_tokens"])
            text = template.render(question["messages"])
            answer = {"text": text} if len(text) <= LONGEST_PROMPT else {"error": "the prompt is too long"}
        except ChatTemplateError as error:
            answer = {"error": error.message}
        except MemoryError:
            answer = {"error": "the template needs too much memory"}
        except Exception as error:  # a template's own mistakes come in any shape
            answer = {"error": type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""The process that renders the chat templates of adapters, as the router's event loop uses it.

Jinja's sandbox restricts what a template may access, but not its time and memory; a process can be killed.
"""

import json
from dataclasses import asdict
from typing import Any

import orjson

from lorikeet.proto.process import LineProcess, ProcessEnded, python
from lorikeet.router.text.templates.chat_template import NO_OPTIONS, TemplateOptions


class TemplateProcess(LineProcess):
    """One process; it renders one prompt at a time."""

    command = python("lorikeet.router.text.templates.template_worker")
    max_line_bytes = 64 << 20
    log_name = "template_process"

    def first_line(self) -> bytes:
        return question_of("", {}, [], NO_OPTIONS)

    async def answer(self, question: bytes, seconds: float) -> dict[str, Any]:
        """The answer to a line of JSON, with `text` and `unread` or with `error`.

        Raises TimeoutError after `seconds`, and ProcessEnded; either way the next call starts another process.
        """
        answer: dict[str, Any] = orjson.loads(await self.ask(question, seconds))
        return answer

    async def start(self) -> None:
        """Start the process if it does not run. Raises RuntimeError if it does not start twice in a row."""
        try:
            await super().start()
        except ProcessEnded:
            raise RuntimeError("the process for chat templates did not start") from None


def question_of(
    template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]], options: TemplateOptions
) -> bytes:
    """The line of JSON that asks for a prompt."""
    question = {"template": template, "special_tokens": special_tokens, "messages": messages, **asdict(options)}
    return json.dumps(question).encode()  # not orjson, which takes no large integers

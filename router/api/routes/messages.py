"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: messages of content blocks, and their streams."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import orjson

from lorikeet.router.api.prepare import Prompt, Prompts
from lorikeet.router.api.routes.chat import ChatPrompt
from lorikeet.router.api.routes.dialect import DialectRequest, DialectRoute, DialectWriter, Logprobs
from lorikeet.router.error_answers import anthropic_body
from lorikeet.router.errors import RouterError
from lorikeet.router.output.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Finish,
    FinishKind,
    ReasoningDelta,
    ToolCallBegin,
)
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, Caller
from lorikeet.router.schemas import anthropic
from lorikeet.router.schemas.model import Translated
from lorikeet.router.schemas.openai import ChatFields
from lorikeet.router.text.tokenizer import Tokenizer

_STOP_REASONS = {FinishKind.STOP: "end_turn", FinishKind.LENGTH: "max_tokens", FinishKind.TOOL_CALLS: "tool_use"}
_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


class MessagesPrompt(ChatPrompt):
    """The prompt of a conversation; ignored fields have the names of this API."""

    async def tokenize(self, adapter: Adapter | None, tokenizer: Tokenizer) -> list[Prompt]:
        [prompt] = await super().tokenize(adapter, tokenizer)
        return [replace(prompt, ignored=tuple(anthropic.applied_thinking(prompt.ignored)))]


class MessagesRoute(DialectRoute):
    """The route."""

    id_prefix = "msg_"
    names = anthropic.NAMES

    def _translate(self, body: dict[str, Any], *, generates: bool = True) -> Translated:
        kind = anthropic.MessagesRequest if generates else anthropic.CountTokensRequest
        return kind.read(body).translated()

    def _prompts(self, params: ChatFields, caller: Caller) -> Prompts:
        return MessagesPrompt(self._service, params, caller)

    def _writer(self, params: DialectRequest, generation: Generation) -> DialectWriter:
        frame = self._envelope("message", params)
        return MessageWriter({"id": frame.id, "type": "message", "role": "assistant", "model": frame.model}, generation)


class MessageWriter:
    """Writer of one output. Each run of thinking or text, and each call, is a block."""

    def __init__(self, message: dict[str, Any], generation: Generation) -> None:
        """`message` is what is known of it before the output."""
        self._message = message
        self._generation = generation
        self._blocks: list[dict[str, Any]] = []
        self._arguments: list[str] = []
        """Pieces of the open call's arguments."""
        self._is_open = self._has_begun = False
        self._finish = Finish(FinishKind.STOP)
        self._more: dict[str, Any] = {}
        self._num_output = self._num_thinking = 0

    @property
    def answer(self) -> dict[str, Any]:
        return self._message | {"content": self._blocks} | self._stop | {"usage": self._usage} | self._more

    @property
    def _stop(self) -> dict[str, Any]:
        finish = self._finish
        if finish.kind is FinishKind.STOP and isinstance(finish.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
        return {"stop_reason": _STOP_REASONS[finish.kind], "stop_sequence": None}

    @property
    def _usage(self) -> dict[str, Any]:
        """Tokens of the prompt that were cached are counted apart."""
        num_cached = self._generation.num_cached
        return {
            "input_tokens": len(self._generation.request.prompt_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._num_output,
            "output_tokens_details": {"thinking_tokens": self._num_thinking},
        }

    def begin(self) -> list[dict[str, Any]]:
        return []  # what is cached is known with the first token

    def add(self, events: Iterable[Event], logprobs: Logprobs) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage}
            lines.append({"type": "message_start", "message": self._message | empty})
        for event in events:
            match event:
                case ReasoningDelta(text):
                    lines += self._text("thinking", text)
                case ContentDelta(text):
                    lines += self._text("text", text)
                case ToolCallBegin(_, call_id, name):
                    lines += self._close()
                    lines.append(self._open({"type": "tool_use", "id": call_id, "name": name, "input": {}}))
                case ArgumentsDelta(_, text):
                    self._arguments.append(text)
                    lines.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case Finish():
                    self._finish = event
        return lines

    def end(self, usage: dict[str, Any], more: dict[str, Any]) -> list[dict[str, Any]]:
        self._num_output, self._more = usage["completion_tokens"], more
        self._num_thinking = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        closed = self._close()
        return [*closed, {"type": "message_delta", "delta": self._stop, "usage": self._usage, **more},
                {"type": "message_stop"}]  # fmt: skip

    def fail(self, error: RouterError) -> list[dict[str, Any]]:
        return [anthropic_body(error)]

    def _text(self, kind: str, text: str) -> list[dict[str, Any]]:
        """More text of a block of that type, whose text has the type's name."""
        events: list[dict[str, Any]] = []
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            events += self._close()
            more = {"signature": ""} if kind == "thinking" else {"citations": None}
            events.append(self._open({"type": kind, kind: "", **more}))
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": _DELTAS[kind], kind: text})]

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        self._is_open = True
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """The end of the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = orjson.loads("".join(self._arguments))
            self._arguments = []
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

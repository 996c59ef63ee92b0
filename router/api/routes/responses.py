"""`/v1/responses`: OpenAI's objects of responses, and the events of their streams. Nothing is stored."""

import secrets
import time
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.routes.dialect import DialectRequest, DialectRoute, DialectWriter, Logprobs
from lorikeet.router.error_answers import openai_body
from lorikeet.router.errors import ResponseNotFound, RouterError
from lorikeet.router.output.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Finish,
    FinishKind,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from lorikeet.router.requests.generation import Generation
from lorikeet.router.schemas import responses
from lorikeet.router.schemas.model import Translated

_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Types of items whose content is text, and of their one part."""


class ResponsesRoute(DialectRoute):
    """The route."""

    id_prefix = "resp_"
    names = responses.NAMES

    def _translate(self, body: dict[str, Any], *, generates: bool = True) -> Translated:
        return responses.ResponsesRequest.read(body).translated(body)

    def _counted(self) -> dict[str, Any]:
        return {"object": "response.input_tokens"}

    def _writer(self, params: DialectRequest, generation: Generation) -> DialectWriter:
        frame = self._envelope("response", params)
        whole = {"id": frame.id, "object": "response", "created_at": frame.created, "model": frame.model}
        return ResponseWriter(whole | params.shown)

    async def missing(self, request: Request) -> Response:
        """404: no response is stored."""
        raise ResponseNotFound(request.path_params["response_id"][:256])


class ResponseWriter:
    """Writer of one output. Each run of reasoning, text, and each call is an item."""

    def __init__(self, response: dict[str, Any]) -> None:
        """`response` is what is known of it before the output."""
        self._response = response
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last item may go on."""
        self._number = 0
        self._finish = Finish(FinishKind.STOP)
        self._ending: dict[str, Any] = {}

    @property
    def answer(self) -> dict[str, Any]:
        ending = {"status": "in_progress", "error": None, "incomplete_details": None, "usage": None} | self._ending
        return self._response | ending | {"output": self._items}

    def begin(self) -> list[dict[str, Any]]:
        return [self._event("response.created", response=self.answer),
                self._event("response.in_progress", response=self.answer)]  # fmt: skip

    def add(self, events: Iterable[Event], logprobs: Logprobs) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for event in events:
            match event:
                case ReasoningDelta(text):
                    lines += self._text("reasoning", text, [])
                case ContentDelta(text):
                    lines += self._text("message", text, logprobs)
                    logprobs = []
                case ToolCallBegin(_, call_id, name):
                    lines += self._close()
                    item = {"id": _id("fc"), "type": "function_call", "status": "in_progress"}
                    lines += self._open(item | {"call_id": call_id, "name": name, "arguments": ""})
                case ArgumentsDelta(_, text):
                    self._items[-1]["arguments"] += text
                    lines.append(self._of_item("function_call_arguments.delta", delta=text))
                case ToolCallEnd():
                    lines += self._close()
                case Finish():
                    self._finish = event
        return lines

    def end(self, usage: dict[str, Any], more: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close() if self._items else [*self._text("message", "", []), *self._close()]
        is_cut = self._finish.kind is FinishKind.LENGTH
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        self._ending = {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": usage["total_tokens"],
            },
            **more,
        }
        kind = "incomplete" if is_cut else "completed"
        return [*events, self._event(f"response.{kind}", response=self.answer)]

    def fail(self, error: RouterError) -> list[dict[str, Any]]:
        shown = openai_body(error)["error"]
        self._ending = {"status": "failed", "error": {"code": "server_error", "message": shown["message"]}}
        return [self._event("response.failed", response=self.answer)]

    def _text(self, kind: str, text: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """More text of an item of a type of `_PARTS`."""
        events: list[dict[str, Any]] = []
        if not (self._is_open and self._items[-1]["type"] == kind):
            events += self._close()
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                item = {"id": _id("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
                part |= {"annotations": [], "logprobs": []}
            else:
                item = {"id": _id("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
            events += self._open(item)
            events.append(self._of_part("content_part.added", part=deepcopy(part)))
            self._items[-1]["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        if kind == "message":
            part["logprobs"] += logprobs
            if text:
                events.append(self._of_part("output_text.delta", delta=text, logprobs=logprobs))
        elif text:
            events.append(self._of_part("reasoning_text.delta", delta=text))
        return events

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else dict(item)
        return [self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)]

    def _close(self) -> list[dict[str, Any]]:
        """The events of an item's end, where one is open."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = "incomplete" if self._finish.kind is FinishKind.LENGTH else "completed"
        if item["type"] == "function_call":
            done = [self._of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            done = [self._of_part(f"{part['type']}.done", text=part["text"], **more),
                    self._of_part("content_part.done", part=part)]  # fmt: skip
        return [*done, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        index = len(self._items) - 1
        return self._event(f"response.{kind}", item_id=self._items[index]["id"], output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"

"""`/v1/chat/completions`: messages through the model's chat template, answers and streams in OpenAI's shapes."""

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.alias_defaults import openai_defaults
from lorikeet.router.api.collect import Completed, collect_all, interleave
from lorikeet.router.api.disconnect import ClientWatch
from lorikeet.router.api.headers import Counts, answer_headers, ignored_fields, stream_headers
from lorikeet.router.api.routes.openai import (
    FINISH_REASONS,
    Envelope,
    LogprobsWanted,
    Prompt,
    VisibleTokens,
    chat_logprobs,
    envelope,
    group_of,
    receipt_of,
    requests_for,
    usage,
)
from lorikeet.router.api.service import Service, Timing, cancel_all, named, now, told
from lorikeet.router.api.sse import DONE, EventStream, event
from lorikeet.router.errors import RouterError, openai_body
from lorikeet.router.receipts.receipt import check_receipt
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import Chunk
from lorikeet.router.schemas.body import read_json
from lorikeet.router.schemas.openai import ChatRequest, read_chat


class ChatRoute:
    """The handler and its two ways to answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        service = self._service
        timing = Timing(now())
        body = openai_defaults(await read_json(request, service.config.max_body_bytes), service.selection)
        wanted = read_chat(body, service.config)
        service.check_room()
        async with ClientWatch(request.receive):
            caller = service.caller(request)
            adapter = await service.adapter(caller, wanted.common.adapter)
            prompt = await service.templates.render(adapter, wanted.messages)
            # The template writes every special token itself.
            prompt_ids = await service.tokenizer.encode(prompt, add_special_tokens=False)
            logprobs = LogprobsWanted(wanted.num_logprobs)
            num_choices = wanted.common.num_choices
            group = await group_of(service, caller, wanted.common, adapter)
            check_receipt(wanted.common.receipt, group.speculation, num_choices)
            requests = requests_for(service, wanted.common, Prompt(prompt_ids, prompt), num_choices, logprobs, group)
            service.validated(timing)
            generations = service.submit(request, requests, timing.arrived_at)
            if not wanted.common.stream:
                try:
                    choices = await collect_all(generations)
                    receipts = await receipt_of(service, generations)
                finally:
                    cancel_all(generations)
            else:
                await named(generations)
        if wanted.common.stream:
            return EventStream(
                self._events(request, wanted, generations, len(prompt_ids)),
                stream_headers(service, len(prompt), generations[0]) | ignored_fields(wanted.ignored),
                on_close=lambda: cancel_all(generations),
            )
        num_generated = sum(len(choice.tokens) for choice in choices)
        request.state.told = told(requests[0], num_generated, choices[0].finish_reason)
        counts = Counts(len(prompt), len(prompt_ids), num_generated, sum(choice.num_skipped for choice in choices))
        headers = answer_headers(service, timing, generations[0], counts) | ignored_fields(wanted.ignored)
        whole = envelope(service, "chatcmpl", "chat.completion", wanted.common).around(
            [self._choice(wanted, index, choice) for index, choice in enumerate(choices)],
            usage(len(prompt_ids), choices[0].num_cached, num_generated, generations),
        )
        whole |= receipts
        return Response(orjson.dumps(whole), headers=headers, media_type="application/json")

    def _choice(self, wanted: ChatRequest, index: int, whole: Completed) -> dict[str, Any]:
        logprobs = None
        if wanted.num_logprobs is not None:
            shown = VisibleTokens(self._service).take(whole.tokens, whole.text, whole.finish_reason)
            logprobs = chat_logprobs(self._service, [token for token, _ in shown])
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "finish_reason": FINISH_REASONS[whole.finish_reason],
            "logprobs": logprobs,
        }

    async def _events(
        self, request: Request, wanted: ChatRequest, generations: list[Generation], num_prompt: int
    ) -> AsyncGenerator[bytes, None]:
        frame = envelope(self._service, "chatcmpl", "chat.completion.chunk", wanted.common)
        visible = [VisibleTokens(self._service) for _ in generations]
        num_generated = num_cached = 0
        opening = {"role": "assistant", "content": ""}
        yield b"".join(_chunk(wanted, frame, _delta(index, opening)) for index in range(len(generations)))
        try:
            async for index, chunk in interleave(generations):
                num_generated += len(chunk.tokens)
                num_cached = max(num_cached, chunk.num_cached) if index == 0 else num_cached
                choice = self._delta_choice(wanted, index, chunk, visible[index])
                if choice is not None:
                    yield _chunk(wanted, frame, choice)
                if chunk.finish_reason is not None:
                    request.state.told = told(generations[index].request, num_generated, chunk.finish_reason)
                    last = _delta(index, {})
                    last["finish_reason"] = FINISH_REASONS[chunk.finish_reason]
                    yield _chunk(wanted, frame, last)
            receipts = await receipt_of(self._service, generations)
        except RouterError as error:
            request.state.failure = error
            yield event(openai_body(error))
            return
        if wanted.common.include_usage:
            yield event(frame.around([], usage(num_prompt, num_cached, num_generated, generations)) | receipts)
        elif receipts:
            yield event(frame.around([]) | receipts)
        yield DONE

    def _delta_choice(
        self, wanted: ChatRequest, index: int, chunk: Chunk, visible: VisibleTokens
    ) -> dict[str, Any] | None:
        """None while there is nothing to show."""
        choice = _delta(index, {"content": chunk.text})
        if wanted.num_logprobs is not None:
            shown = visible.take(chunk.tokens, chunk.text, chunk.finish_reason)
            if shown:
                choice["logprobs"] = chat_logprobs(self._service, [token for token, _ in shown])
                return choice
        return choice if chunk.text else None


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _chunk(wanted: ChatRequest, frame: Envelope, choice: dict[str, Any]) -> bytes:
    whole = frame.around([choice])
    if wanted.common.include_usage:
        whole["usage"] = None
    return event(whole)

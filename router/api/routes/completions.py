"""`/v1/completions`: one or several prompts, `n` and `best_of` of each, answers and streams in OpenAI's shapes."""

from collections.abc import AsyncGenerator
from dataclasses import replace
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
    Group,
    LogprobsWanted,
    Prompt,
    VisibleTokens,
    completion_logprobs,
    decoded,
    envelope,
    group_of,
    prompt_logprobs,
    receipt_of,
    requests_for,
    usage,
)
from lorikeet.router.api.service import Service, Timing, cancel_all, named, now, told
from lorikeet.router.api.sse import DONE, EventStream, event
from lorikeet.router.errors import RouterError, ValidationError, openai_body
from lorikeet.router.receipts.receipt import check_receipt
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.types import Chunk, GenerationRequest
from lorikeet.router.schemas.body import read_json
from lorikeet.router.schemas.openai import CompletionRequest, read_completion


class CompletionsRoute:
    """The handler and its two ways to answer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self, request: Request) -> Response:
        service = self._service
        timing = Timing(now())
        body = openai_defaults(await read_json(request, service.config.max_body_bytes), service.selection)
        wanted = read_completion(body, service.config)
        service.check_room()
        async with ClientWatch(request.receive):
            prompts = [await self._prompt(given, wanted.echo) for given in wanted.prompts]
            caller = service.caller(request)
            adapter = await service.adapter(caller, wanted.common.adapter)
            group = await group_of(service, caller, wanted.common, adapter)
            check_receipt(wanted.common.receipt, group.speculation, len(prompts) * wanted.best_of)
            requests = self._requests(wanted, prompts, group)
            service.validated(timing)
            generations = service.submit(request, requests, timing.arrived_at)
            if not wanted.common.stream:
                try:
                    sequences = await collect_all(generations)
                    receipts = await receipt_of(service, generations)
                finally:
                    cancel_all(generations)
            else:
                await named(generations)
        characters = sum(len(prompt.text) for prompt in prompts)
        ignored = ignored_fields(wanted.ignored)
        if wanted.common.stream:
            return EventStream(
                self._events(request, wanted, prompts, generations),
                stream_headers(service, characters, generations[0]) | ignored,
                on_close=lambda: cancel_all(generations),
            )
        num_prompt = sum(len(prompt.ids) for prompt in prompts)
        num_generated = 0 if wanted.common.max_tokens == 0 else sum(len(sequence.tokens) for sequence in sequences)
        request.state.told = told(requests[0], num_generated, sequences[0].finish_reason)
        counts = Counts(characters, num_prompt, num_generated, sum(sequence.num_skipped for sequence in sequences))
        num_cached = sum(sequence.num_cached for sequence in sequences[:: wanted.best_of])
        whole = envelope(service, "cmpl", "text_completion", wanted.common).around(
            self._choices(wanted, prompts, sequences), usage(num_prompt, num_cached, num_generated, generations)
        )
        whole |= receipts
        headers = answer_headers(service, timing, generations[0], counts) | ignored
        return Response(orjson.dumps(whole), headers=headers, media_type="application/json")

    async def _prompt(self, given: str | list[int], echo: bool) -> Prompt:
        tokenizer = self._service.tokenizer
        if isinstance(given, str):
            ids = await tokenizer.encode(given)
            if not ids:
                raise ValidationError("`prompt` cannot be empty", "prompt")
            return Prompt(ids, given)
        self._service.check_ids(given, "prompt")
        return Prompt(given, decoded(self._service, given) if echo else "")

    def _requests(self, wanted: CompletionRequest, prompts: list[Prompt], whole: Group) -> list[GenerationRequest]:
        """`best_of` for each prompt, in the order of the prompts."""
        logprobs = LogprobsWanted(wanted.num_logprobs, prompt=wanted.echo)
        requests: list[GenerationRequest] = []
        for index, prompt in enumerate(prompts):
            group = replace(whole, id=f"{whole.id}/{index}") if len(prompts) > 1 else whole
            requests += requests_for(self._service, wanted.common, prompt, wanted.best_of, logprobs, group)
        return requests

    def _choices(
        self, wanted: CompletionRequest, prompts: list[Prompt], sequences: list[Completed]
    ) -> list[dict[str, Any]]:
        """`n` per prompt: the likeliest where `best_of` gave more."""
        choices = []
        for index, prompt in enumerate(prompts):
            group = sequences[index * wanted.best_of : (index + 1) * wanted.best_of]
            if wanted.best_of > wanted.common.num_choices:
                group = sorted(group, key=lambda sequence: -sequence.mean_logprob)[: wanted.common.num_choices]
            choices += [self._choice(wanted, prompt, sequence) for sequence in group]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return choices

    def _choice(self, wanted: CompletionRequest, prompt: Prompt, whole: Completed) -> dict[str, Any]:
        only_prompt = wanted.common.max_tokens == 0
        echoed = prompt.text if wanted.echo else ""
        logprobs: dict[str, list[Any] | None] | None = None
        if wanted.num_logprobs is not None:
            tokens, text = ([], "") if only_prompt else (whole.tokens, whole.text)
            shown = VisibleTokens(self._service, len(echoed)).take(tokens, text, whole.finish_reason)
            logprobs = completion_logprobs(self._service, shown, wanted.num_logprobs)
            if wanted.echo:
                logprobs = _joined(prompt_logprobs(self._service, whole.prefill, whole.prefill_alternatives), logprobs)
        return {
            "index": 0,
            "text": echoed + ("" if only_prompt else whole.text),
            "logprobs": logprobs,
            "finish_reason": "length" if only_prompt else FINISH_REASONS[whole.finish_reason],
        }

    async def _events(
        self, request: Request, wanted: CompletionRequest, prompts: list[Prompt], generations: list[Generation]
    ) -> AsyncGenerator[bytes, None]:
        frame = envelope(self._service, "cmpl", "text_completion", wanted.common)
        echoed = [prompts[index // wanted.best_of].text if wanted.echo else "" for index in range(len(generations))]
        visible = [VisibleTokens(self._service, len(text)) for text in echoed]
        only_prompt = wanted.common.max_tokens == 0
        num_generated = 0
        cached = [0] * len(generations)
        try:
            async for index, chunk in interleave(generations):
                cached[index] = chunk.num_cached
                if only_prompt:
                    chunk.tokens, chunk.text = [], ""
                num_generated += len(chunk.tokens)
                if chunk.finish_reason is not None:
                    request.state.told = told(generations[index].request, num_generated, chunk.finish_reason)
                choice = self._chunk_choice(wanted, index, chunk, visible[index])
                choice["text"], echoed[index] = echoed[index] + choice["text"], ""
                if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                    yield _chunk(wanted, frame, choice)
            receipts = await receipt_of(self._service, generations)
        except RouterError as error:
            request.state.failure = error
            yield event(openai_body(error))
            return
        if wanted.common.include_usage:
            num_prompt = sum(len(prompt.ids) for prompt in prompts)
            told_usage = usage(num_prompt, sum(cached[:: wanted.best_of]), num_generated, generations)
            yield event(frame.around([], told_usage) | receipts)
        elif receipts:
            yield event(frame.around([]) | receipts)
        yield DONE

    def _chunk_choice(
        self, wanted: CompletionRequest, index: int, chunk: Chunk, visible: VisibleTokens
    ) -> dict[str, Any]:
        logprobs: dict[str, list[Any] | None] | None = None
        if wanted.num_logprobs is not None:
            shown = visible.take(chunk.tokens, chunk.text, chunk.finish_reason)
            if shown:
                logprobs = completion_logprobs(self._service, shown, wanted.num_logprobs)
            if chunk.prefill is not None:
                prompt = prompt_logprobs(self._service, chunk.prefill, chunk.prefill_alternatives)
                logprobs = prompt if logprobs is None else _joined(prompt, logprobs)
        finish = chunk.finish_reason
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else FINISH_REASONS[finish],
        }


def _joined(first: dict[str, list[Any] | None], second: dict[str, list[Any] | None]) -> dict[str, list[Any] | None]:
    """The lists of `first` followed by those of `second`."""
    joined: dict[str, list[Any] | None] = {}
    for name, values in first.items():
        more = second[name]
        joined[name] = None if values is None or more is None else values + more
    return joined


def _chunk(wanted: CompletionRequest, frame: Envelope, choice: dict[str, Any]) -> bytes:
    whole = frame.around([choice])
    if wanted.common.include_usage:
        whole["usage"] = None
    return event(whole)

"""What OpenAI's two generation routes share: from a body to requests, and from generations to an answer or a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.answer_parts import (
    ENTRY_CHARS,
    LARGE_ENTRIES,
    Completed,
    Counts,
    Envelope,
    VisibleTokens,
    answer_headers,
    collect_all,
    count_reasoning,
    ignored_fields,
    interleave,
    json_response,
    metrics,
    read_all,
    repeated,
    stream_headers,
    token_counts,
    usage,
    written,
)
from lorikeet.router.api.prepare import (
    PreparedRequest,
    Prompt,
    Prompts,
    Timing,
    cancel_all,
    log_fields,
    named,
    now,
    prepare,
)
from lorikeet.router.api.service import Routes, Service
from lorikeet.router.api.streaming import DONE, ClientWatch, EventStream, TextEvents, event
from lorikeet.router.error_answers import openai_body
from lorikeet.router.errors import RouterError
from lorikeet.router.output.events import Event, ReasoningDelta
from lorikeet.router.output.reader import PlainReader, Reader
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Caller, FinishReason, OutputChunk
from lorikeet.router.schemas.openai import OpenAIRequest, check_lengths, check_texts
from lorikeet.router.text.tokenizer import Tokenizer

FINISH_REASONS = {
    None: None,
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}
LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

Params = TypeVar("Params", bound=OpenAIRequest)


class OpenAIPrompts(Prompts):
    """Prompts with OpenAI's limits."""

    def __init__(self, service: Service, params: OpenAIRequest, caller: Caller) -> None:
        self._service = service
        self._wanted = params
        self._caller = caller

    def naming_field(self) -> str:
        if self._wanted.num_logprobs is not None:
            return "logprobs"
        return "" if self._wanted.report.num_prompt_logprobs is None else "prompt_logprobs"

    def max_tokens(self, num_prompt: int) -> int:
        # Scoring a prompt needs a step like any other: its one token is dropped.
        limit = 1 if self._wanted.only_prompt else self._wanted.max_tokens
        return check_lengths(num_prompt, limit, self._service.config)

    async def _tokenized(self, text: str, field: str, tokenizer: Tokenizer) -> list[int]:
        """The token ids of a prompt that are kept; `field` is the request's field with the text."""
        config, fields = self._service.config, self._wanted.prompt
        special, limit, caller = fields.add_special_tokens, config.max_input_length, self._caller.identity
        if fields.keeps_last:
            num_kept = fields.most(limit) or limit
            return await tokenizer.encode_tail(text, num_kept, special, caller=caller, field="truncate_prompt_tokens")
        check_texts([text], tokenizer.length, config, field)
        return fields.cut(await tokenizer.encode(text, special, caller=caller), limit)


class OpenAIRoute(Routes, ABC, Generic[Params]):
    """One route: subclasses read its body and shape its choices."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    """`object` of an answer."""
    chunk_name: ClassVar[str]
    """`object` of a chunk of a stream."""

    @abstractmethod
    def _read(self, body: dict[str, Any], caller: Caller) -> Params:
        """With the defaults of the alias that the caller names. Raises WrongJsonType or ValidationError."""

    @abstractmethod
    def _prompts(self, params: Params, caller: Caller) -> Prompts:
        """The prompts of a body."""

    @abstractmethod
    def _choice(self, params: Params, prompt: Prompt, whole: Completed) -> dict[str, Any]:
        """One choice of an answer; `index` is filled in by the caller."""

    @abstractmethod
    def _chunk_choices(
        self, params: Params, index: int, chunk: OutputChunk, visible: VisibleTokens, events: list[Event]
    ) -> Iterator[dict[str, Any]]:
        """The choices of a stream that `chunk` gives, one per event. `events` are those of its reader."""

    @abstractmethod
    def _text_choice(self, text: str) -> dict[str, Any]:
        """The choice of a stream for a further text, where nothing is reported of its tokens."""

    def _first_choices(self, num_choices: int) -> list[dict[str, Any]]:
        """What a stream starts with."""
        return []

    def _prompt_fields(self, params: Params, prompts: list[Prompt]) -> dict[str, Any]:
        """What an answer, and the first event of a stream, contain about the prompt besides the choices."""
        return {}

    def _answer_fields(self, params: Params, sequences: list[Completed]) -> dict[str, Any]:
        """What an answer contains besides the choices."""
        return {}

    async def handle(self, request: Request) -> Response:
        """Answer one request. Raises RouterError."""
        service = self._service
        timing = Timing(now())
        params = self._read(await service.body(request), service.caller(request))
        stream = params.stream
        async with ClientWatch(request.receive):
            caller = self._named(request, params)
            prepared = await self._prepare(request, params, self._prompts(params, caller), timing)
            prompts, generations = prepared.prompts, prepared.generations
            conversation = prompts[0].conversation
            readers = [] if conversation is None else [conversation.reader() for _ in generations]

            def close() -> None:
                cancel_all(generations)
                for reader in readers:
                    reader.close()

            if stream:
                try:
                    await named(generations)
                except BaseException:
                    close()
                    raise
            else:
                try:
                    sequences = await collect_all(generations)
                    await read_all(readers, sequences)
                    receipts = await self._receipt(generations)
                finally:
                    close()
        characters = sum(len(prompt.text) for prompt in prompts)
        ignored = ignored_fields([*params.ignored, *prepared.ignored])
        if stream:
            headers = stream_headers(service, characters, generations[0]) | ignored
            writer = TextEvents()
            events = self._events(request, params, prompts, generations, readers, writer)
            return EventStream(events, headers, on_close=close, writer=writer)
        num_prompt = sum(len(prompt.ids) for prompt in prompts)
        num_generated = 0 if params.only_prompt else sum(len(sequence.tokens) for sequence in sequences)
        num_skipped = sum(sequence.num_skipped for sequence in sequences)
        request.state.log_fields = log_fields(prepared.requests[0], num_generated, sequences[0].finish_reason)
        whole = await self._whole(params, prompts, sequences, generations, receipts)
        sums = Counts(characters, num_prompt, num_generated, num_skipped)
        headers = answer_headers(service, timing, generations[0], sums) | ignored
        return json_response(whole, headers)

    async def _whole(
        self,
        params: Params,
        prompts: list[Prompt],
        sequences: list[Completed],
        generations: list[Generation],
        receipts: dict[str, Any],
    ) -> dict[str, Any]:
        """The body of an answer."""
        reasoning = [sequence.message.reasoning for sequence in sequences]
        num_reasoning = await count_reasoning(reasoning, generations)
        counts = usage(params, sum(len(prompt.ids) for prompt in prompts), generations, num_reasoning)
        frame = self._envelope(self.object_name, params)
        whole = frame.around(await self._choices(params, prompts, sequences, generations[0].request.caller), counts)
        whole |= receipts | self._prompt_fields(params, prompts)
        num_entries = 0 if sequences[0].prefill is None else sequences[0].prefill.num_entries
        write = partial(self._answer_fields, params, sequences)
        whole |= await written(self._service, generations[0].request.caller, num_entries, write)
        return whole | metrics(generations) | repeated(params)

    def _named(self, request: Request, params: Params) -> Caller:
        """The caller, with the body's `request_id` where the header has none."""
        caller = self._service.caller(request)
        if params.request_id is None or "x-request-id" in request.headers:
            return caller
        request.state.request_id = params.request_id
        structlog.contextvars.bind_contextvars(request_id=params.request_id)
        request.state.caller = replace(caller, request_id=params.request_id)
        return self._service.caller(request)

    async def _prepare(self, request: Request, params: Params, prompts: Prompts, timing: Timing) -> PreparedRequest:
        """Raises RouterError."""
        return await prepare(self._service, request, params.fields, prompts, timing)

    def _prompt_logprobs_of(self, params: Params, whole: Completed) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`, where asked for: the likeliest tokens and the prompt's own at each position."""
        count = params.report.num_prompt_logprobs
        if count is None:
            return {}
        assert whole.prefill is not None
        shown: list[dict[str, Any] | None] = []
        for (token_id, text, logprob), best, rank in zip(
            whole.prefill.tokens(), whole.prefill.alternatives(), (None, *whole.prefill.ranks), strict=True
        ):
            if logprob is None:
                shown.append(None)
                continue
            entries = [(rank, (token_id, text, logprob)), *enumerate(best.first(count), 1)]
            shown.append(
                {
                    str(other): {"logprob": max(value, LOWEST_LOGPROB), "rank": place, "decoded_token": other_text}
                    for place, (other, other_text, value) in entries
                }
            )
        return {"prompt_logprobs": shown}

    async def _receipt(self, generations: list[Generation]) -> dict[str, Any]:
        """The answer's `receipt` where the request asks for one. Raises GenerationFailed."""
        if not generations[0].request.receipt:
            return {}
        return {"receipt": await self._service.receipts.of(generations[0])}

    def _envelope(self, kind: str, params: OpenAIRequest) -> Envelope:
        info = self._service.dispatcher.info
        fingerprint = "unknown"
        if info is not None:
            fingerprint = f"{info.version}-{info.dtype.removeprefix('torch.')}-{info.device}"
        model = params.fields.adapter.name or self._service.config.model_name
        identity = f"{self.id_prefix}{params.request_id or secrets.token_hex(16)}"
        return Envelope(identity, kind, int(time.time()), model, fingerprint)

    async def _choices(
        self, params: Params, prompts: list[Prompt], sequences: list[Completed], caller: str
    ) -> list[dict[str, Any]] | list[orjson.Fragment]:
        """`n` per prompt: the likeliest where `best_of` gave more. As JSON where they have much to list."""
        chosen = []
        for index, prompt in enumerate(prompts):
            group = sequences[index * params.best_of : (index + 1) * params.best_of]
            if params.best_of > params.num_choices:
                group = sorted(group, key=lambda sequence: -sequence.mean_logprob)[: params.num_choices]
            chosen += [(prompt, sequence) for sequence in group]

        def choice(index: int) -> dict[str, Any]:
            return self._choice(params, *chosen[index]) | {"index": index}

        def as_json(index: int) -> orjson.Fragment:
            return orjson.Fragment(orjson.dumps(choice(index)))

        nums = [sequence.num_entries for _, sequence in chosen] if _lists_tokens(params) else [0]
        if sum(nums) <= LARGE_ENTRIES:
            return [choice(index) for index in range(len(chosen))]
        pool = self._service.tokenizer.pool
        return [await pool.run(partial(as_json, index), caller, ENTRY_CHARS * num) for index, num in enumerate(nums)]

    async def _events(
        self,
        request: Request,
        params: Params,
        prompts: list[Prompt],
        generations: list[Generation],
        readers: list[Reader],
        writer: TextEvents,
    ) -> AsyncGenerator[bytes, None]:
        """The events that `writer` does not write."""
        frame = self._envelope(self.chunk_name, params)
        visible = [_visible(params, prompts[index // params.best_of]) for index in range(len(generations))]
        report, num_generated, reasoning = params.report, 0, [""] * len(generations)
        num_prompt = sum(len(prompt.ids) for prompt in prompts)

        def shared() -> dict[str, Any]:
            """What every event has."""
            if not report.usage:
                return repeated(params)
            so_far = token_counts(num_prompt, num_generated) if report.continuous_usage else None
            return {"usage": so_far} | repeated(params)

        if first := self._first_choices(len(generations)):
            fields = shared() | self._prompt_fields(params, prompts)
            yield b"".join(event(frame.around([choice]) | fields) for choice in first)
        is_plain = _differs_in_text(params, readers)
        if is_plain:
            writer.set_form(lambda text: event(frame.around([self._text_choice(text)]) | shared()))
        try:
            async for index, chunk in interleave(generations, writer if is_plain else None):
                if params.only_prompt:
                    chunk.tokens, chunk.text = [], ""
                num_generated += len(chunk.tokens)
                if chunk.finish_reason is not None:
                    sent, num_tokens = generations[index].request, num_generated + len(writer.texts)
                    request.state.log_fields = log_fields(sent, num_tokens, chunk.finish_reason)
                events: list[Event] = []
                if readers:
                    events = await readers[index].read(chunk.text, chunk.finish_reason, chunk.stop_reason)
                    reasoning[index] += "".join(event.text for event in events if isinstance(event, ReasoningDelta))
                choices = self._chunk_choices(params, index, chunk, visible[index], events)
                if chunk.prefill is not None:
                    caller, num_entries = generations[index].request.caller, chunk.prefill.num_entries
                    choices = iter(await written(self._service, caller, num_entries, partial(list, choices)))
                for choice in choices:
                    yield event(frame.around([choice]) | shared())
            receipts = await self._receipt(generations)
        except RouterError as error:
            request.state.failure = error
            yield event(openai_body(error))
            return
        is_counted = report.usage or generations[0].timeline is not None  # traces have the number
        num_reasoning = await count_reasoning(reasoning if is_counted else [], generations)
        if report.usage:
            last = usage(params, num_prompt, generations, num_reasoning)
            yield event(frame.around([], last) | receipts | metrics(generations) | repeated(params))
        elif receipts:
            yield event(frame.around([]) | receipts)
        yield DONE


def _visible(params: OpenAIRequest, prompt: Prompt) -> VisibleTokens:
    """Those of a stream that has not begun."""
    visible = VisibleTokens(prompt.text if params.echo else "")
    visible.prompt_ids = prompt.ids if params.report.token_ids else None
    return visible


def _lists_tokens(params: OpenAIRequest) -> bool:
    report = params.report
    lists_logprobs = params.num_logprobs is not None or report.num_prompt_logprobs is not None
    return lists_logprobs or report.token_ids or report.tokens


def _differs_in_text(params: OpenAIRequest, readers: list[Reader]) -> bool:
    """Whether the events of a stream differ in their text alone, except for the first and the last one."""
    is_counted = params.only_prompt or params.report.continuous_usage
    return not (_lists_tokens(params) or is_counted) and all(isinstance(reader, PlainReader) for reader in readers)

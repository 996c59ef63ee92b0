"""What routes for conversations of other APIs share: a body becomes that of a chat, its events become the API's own."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.answer_parts import (
    Completed,
    VisibleTokens,
    count_reasoning,
    interleave,
    json_response,
    metrics,
    usage,
)
from lorikeet.router.api.prepare import PreparedRequest, Prompt, Prompts, Timing, check_room, log_fields
from lorikeet.router.api.routes.chat import ChatRoute
from lorikeet.router.api.streaming import ClientWatch, TextEvents, named_event
from lorikeet.router.errors import RouterError
from lorikeet.router.output.events import ContentDelta, Event, ReasoningDelta, ToolCallBegin, whole_call
from lorikeet.router.output.reader import Reader
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Caller
from lorikeet.router.schemas.model import Translated, in_words_of
from lorikeet.router.schemas.openai import ChatCompletionRequest, ChatFields

Logprobs = list[dict[str, Any]]
"""Log probabilities of the tokens of one chunk, as chat completions show them."""


@dataclass(frozen=True, kw_only=True)
class DialectRequest(ChatFields):
    """A chat, and what its answer repeats of the body as it was."""

    shown: dict[str, Any]


class DialectWriter(Protocol):
    """Builds the answer of one output from its events, and the events of its stream."""

    def begin(self) -> list[dict[str, Any]]:
        """What a stream starts with."""

    def add(self, events: Iterable[Event], logprobs: Logprobs) -> list[dict[str, Any]]:
        """The events of the stream for more output."""

    def end(self, usage: dict[str, Any], more: dict[str, Any]) -> list[dict[str, Any]]:
        """The last events. `usage` is that of chat completions, `more` are further fields of the answer."""

    def fail(self, error: RouterError) -> list[dict[str, Any]]:
        """The last events for an output that failed."""

    @property
    def answer(self) -> dict[str, Any]:
        """The whole answer, after `end`."""


class DialectRoute(ChatRoute):
    """One route; the chat that a body becomes is served like any other."""

    names: ClassVar[Mapping[str, str]]
    """Fields of chat completions, and what they are called here."""

    @abstractmethod
    def _translate(self, body: dict[str, Any], *, generates: bool = True) -> Translated:
        """Raises WrongJsonType or ValidationError."""

    @abstractmethod
    def _writer(self, params: DialectRequest, generation: Generation) -> DialectWriter:
        """The writer of one output."""

    async def count(self, request: Request) -> Response:
        """The number of tokens of the prompt that the body would have."""
        service = self._service
        body, caller = await service.body(request), service.caller(request)
        params = self._read_translated(self._translate(body, generates=False), caller)
        check_room(service, caller)
        async with ClientWatch(request.receive):
            with in_words_of(self.names):
                adapter = await service.selection.choose(params.fields.adapter, caller)
                tokenizer = await service.tokenizers.of(adapter)
                prompts = await self._prompts(params, caller).tokenize(adapter, tokenizer)
        return json_response({**self._counted(), "input_tokens": len(prompts[0].ids)})

    def _counted(self) -> dict[str, Any]:
        """What the answer of `count` has besides the number."""
        return {}

    def _read(self, body: dict[str, Any], caller: Caller) -> DialectRequest:
        return self._read_translated(self._translate(body), caller)

    def _read_translated(self, translated: Translated, caller: Caller) -> DialectRequest:
        with in_words_of(self.names):
            body, config = self._service.openai_defaults(caller, translated.chat), self._service.config
            chat = ChatCompletionRequest.read(body, config).to_request(config)
        values = {field.name: getattr(chat, field.name) for field in fields(chat)}
        values["ignored"] = [*translated.ignored, *chat.ignored]
        return DialectRequest(**values, shown=translated.shown)

    async def _prepare(self, request: Request, params: ChatFields, prompts: Prompts, timing: Timing) -> PreparedRequest:
        with in_words_of(self.names):
            return await super()._prepare(request, params, prompts, timing)

    async def _whole(
        self,
        params: ChatFields,
        prompts: list[Prompt],
        sequences: list[Completed],
        generations: list[Generation],
        receipts: dict[str, Any],
    ) -> dict[str, Any]:
        assert isinstance(params, DialectRequest)
        writer, whole = self._writer(params, generations[0]), sequences[0]
        logprobs = self._logprobs(params, whole.tokens, whole.text, whole.finish_reason, VisibleTokens())
        writer.begin()
        writer.add(_events_of(whole), logprobs["content"] if logprobs is not None else [])
        num_reasoning = await count_reasoning([whole.message.reasoning], generations)
        counts = usage(params, len(prompts[0].ids), generations, num_reasoning)
        writer.end(counts, receipts | metrics(generations))
        return writer.answer

    async def _events(
        self,
        request: Request,
        params: ChatFields,
        prompts: list[Prompt],
        generations: list[Generation],
        readers: list[Reader],
        writer: TextEvents,
    ) -> AsyncGenerator[bytes, None]:
        """Of all tokens: `writer` is not used, because the events of these APIs differ in more than their text."""
        assert isinstance(params, DialectRequest)
        dialect, visible = self._writer(params, generations[0]), VisibleTokens()
        num_generated, reasoning = 0, list[str]()
        if first := dialect.begin():
            yield b"".join(map(named_event, first))
        try:
            async for _, chunk in interleave(generations):
                num_generated += len(chunk.tokens)
                if chunk.finish_reason is not None:
                    sent = generations[0].request
                    request.state.log_fields = log_fields(sent, num_generated, chunk.finish_reason)
                events = await readers[0].read(chunk.text, chunk.finish_reason, chunk.stop_reason)
                reasoning += [event.text for event in events if isinstance(event, ReasoningDelta)]
                logprobs = self._logprobs(params, chunk.tokens, chunk.text, chunk.finish_reason, visible)
                if lines := dialect.add(events, logprobs["content"] if logprobs is not None else []):
                    yield b"".join(map(named_event, lines))
            receipts = await self._receipt(generations)
            num_reasoning = await count_reasoning(["".join(reasoning)], generations)
            counts = usage(params, len(prompts[0].ids), generations, num_reasoning)
            last = dialect.end(counts, receipts | metrics(generations))
        except RouterError as error:
            request.state.failure = error
            last = dialect.fail(error)
        yield b"".join(map(named_event, last))


def _events_of(whole: Completed) -> list[Event]:
    """The events of a complete output: reasoning, text, calls."""
    message = whole.message
    events: list[Event] = [ReasoningDelta(message.reasoning)] if message.reasoning else []
    events += [ContentDelta(message.content)] if message.content else []
    for index, call in enumerate(message.tool_calls):
        _, *rest = whole_call(index, call.name, call.arguments)
        events += [ToolCallBegin(index, call.id, call.name), *rest]
    return [*events, message.finish]

"""LoRAX's generation routes: `/generate`, `/generate_stream`, and `/` with `/invocations`, which take `stream`.

`/predict` is here too, as `/generate` with a different body and answer.
"""

from collections.abc import AsyncGenerator
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.router.api.answer_parts import (
    Completed,
    Counts,
    answer_headers,
    collect_all,
    ignored_fields,
    json_response,
    speculation_report,
    stream_headers,
    written,
)
from lorikeet.router.api.prepare import (
    PreparedRequest,
    Prompt,
    Prompts,
    Timing,
    cancel_all,
    check_ids,
    log_fields,
    named,
    now,
    prepare,
)
from lorikeet.router.api.service import Routes, Service
from lorikeet.router.api.streaming import ClientWatch, EventStream, EventWriter, event
from lorikeet.router.error_answers import lorax_body
from lorikeet.router.errors import RouterError, ValidationError
from lorikeet.router.requests.generation import Generation
from lorikeet.router.requests.request import Adapter, Alternatives, GenerationRequest, OutputToken
from lorikeet.router.schemas.native import (
    CompatGenerateRequest,
    GenerateRequest,
    LoraxBody,
    PredictRequest,
    check_lengths,
    check_text,
)
from lorikeet.router.schemas.openai import ReportFields
from lorikeet.router.text.tokenizer import Tokenizer

_TOKEN_EVENT = b'data: {"token":{"id":%d,"text":%b,"logprob":%b,%b},"generated_text":null,"details":null}\n\n'
_FLAGS = b'"special":%b,"skipped":%b,"source":"%b"'
_PLAIN = _FLAGS % (b"false", b"false", SOURCE_NAMES[pb.SOURCE_TARGET].encode())
"""Of a token without drafts that is not special."""

_PREDICT_DEFAULTS: dict[str, Any] = {"max_new_tokens": 40, "top_k": 10, "top_p": 0.9, "return_full_text": True}
_PREDICT_TOKENS = 4
"""Draft tokens per step, where the server allows as many."""


class LoraxPrompt(Prompts):
    """The one prompt of a body, with LoRAX's limits; with `truncate` its last tokens."""

    def __init__(self, service: Service, native: GenerateRequest, caller: str) -> None:
        self._service = service
        self._native = native
        self._caller = caller

    async def tokenize(self, adapter: Adapter | None, tokenizer: Tokenizer) -> list[Prompt]:
        native, truncate = self._native, self._native.parameters.truncate
        with_special = native.parameters.add_special_tokens
        if native.input_ids is not None:
            check_ids(self._service, native.input_ids, "inputs", tokenizer)
            return [Prompt(native.input_ids if truncate is None else native.input_ids[-truncate:])]
        if truncate is not None:
            ids = await tokenizer.encode_tail(native.text, truncate, with_special, caller=self._caller)
        else:
            check_text(native.text, tokenizer.length, self._service.config)
            ids = await tokenizer.encode(native.text, with_special, caller=self._caller)
        if not ids:
            raise ValidationError("`inputs` has no tokens", "inputs")
        return [Prompt(ids, native.text)]

    def naming_field(self) -> str:
        return "top_n_tokens" if self._native.parameters.top_n_tokens else ""

    def max_tokens(self, num_prompt: int) -> int:
        return check_lengths(num_prompt, self._native.parameters.max_new_tokens, self._service.config)


class NativeRoutes(Routes):
    """The handlers; each reads a body and answers in LoRAX's shapes."""

    async def generate(self, request: Request) -> Response:
        arrived_at = now()
        native = self._read(request, await self._service.body(request), GenerateRequest)
        return await self._respond(request, native, arrived_at, as_list=False)

    async def generate_stream(self, request: Request) -> Response:
        arrived_at = now()
        native = self._read(request, await self._service.body(request), GenerateRequest)
        return await self._stream(request, native, arrived_at)

    async def compat(self, request: Request) -> Response:
        """`/` and `/invocations`: one route for both, and a list of one when not streaming."""
        arrived_at = now()
        native = self._read(request, await self._service.body(request), CompatGenerateRequest)
        if native.stream:
            return await self._stream(request, native, arrived_at)
        return await self._respond(request, native, arrived_at, as_list=True)

    def _read(self, request: Request, body: dict[str, Any], kind: type[LoraxBody]) -> LoraxBody:
        return kind.read(self._service.native_defaults(self._service.caller(request), body))

    async def _respond(
        self, request: Request, native: GenerateRequest, arrived_at: float, *, as_list: bool
    ) -> Response:
        ignored = ignored_fields(native.ignored())
        answer, headers = await self.generate_answer(request, native, arrived_at)
        headers |= ignored
        return json_response([answer] if as_list else answer, headers)

    async def generate_answer(
        self, request: Request, native: GenerateRequest, arrived_at: float
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The answer to a request that does not stream, and its headers. Raises RouterError."""
        parameters = native.parameters
        timing = Timing(arrived_at)
        async with ClientWatch(request.receive):
            prepared = await self._prepare(request, native, timing, streaming=False)
            sent, generations = prepared.requests[0], prepared.generations
            try:
                sequences = await collect_all(generations)
                receipt = await self._service.receipts.of(generations[0]) if parameters.receipt else None
            finally:
                cancel_all(generations)
        best = max(range(len(sequences)), key=lambda index: sequences[index].mean_logprob)
        chosen = sequences[best]
        answer: dict[str, Any] = {"generated_text": self._shown_text(native, chosen)}
        if parameters.details or parameters.decoder_input_details:
            others = sequences[:best] + sequences[best + 1 :]
            details = partial(self._details, native, sent, chosen, others)
            num_entries = sum(sequence.num_entries for sequence in sequences)
            answer["details"] = await written(self._service, sent.caller, num_entries, details)
            answer["details"] |= _speculation_details(generations[best])
        if receipt is not None:
            answer.get("details", answer)["receipt"] = receipt
        request.state.log_fields = log_fields(sent, len(chosen.tokens), chosen.finish_reason)
        counts = Counts(len(native.text), len(sent.prompt_ids), len(chosen.tokens), chosen.num_skipped)
        headers = answer_headers(self._service, timing, generations[best], counts)
        return answer, headers

    async def _stream(self, request: Request, native: GenerateRequest, arrived_at: float) -> EventStream:
        """A stream that starts once the adapter is resolved. Its status is 200 even after a failure, as in LoRAX."""
        timing, ignored = Timing(arrived_at), ignored_fields(native.ignored())
        generation: Generation | None = None
        writer = _TokenEvents()
        try:
            async with ClientWatch(request.receive):
                prepared = await self._prepare(request, native, timing, streaming=True)
                [generation] = prepared.generations
                await named(prepared.generations)
            events = self._events(request, native, generation, writer)
        except RouterError as error:
            request.state.failure = error
            events = _only(event(lorax_body(error)))
        headers = stream_headers(self._service, len(native.text), generation) | ignored
        on_close = None if generation is None else generation.cancel
        return EventStream(events, headers, on_close=on_close, writer=writer)

    async def _events(
        self, request: Request, native: GenerateRequest, generation: Generation, writer: "_TokenEvents"
    ) -> AsyncGenerator[bytes, None]:
        """One item per chunk with an event per token, but for what `writer` writes. A failure is the last event, since
        the status is already sent.
        """
        sent = generation.request
        try:
            while True:
                chunk = await generation.next(writer)
                writer.texts.append(chunk.text)
                if chunk.finish_reason is not None:
                    break
                if chunk.tokens:
                    yield b"".join([self._token_event(token, native) for token in chunk.tokens])
            num_tokens = generation.num_generated
            request.state.log_fields = log_fields(sent, num_tokens, chunk.finish_reason)
            details: dict[str, Any] | None = None
            if native.parameters.details:
                details = {
                    "finish_reason": chunk.finish_reason.value,
                    "prompt_tokens": len(sent.prompt_ids),
                    "generated_tokens": num_tokens,
                    "seed": sent.sampling.seed if sent.sampling.do_sample else None,
                    **_speculation_details(generation),
                }
            whole = Completed(seed=sent.sampling.seed, text="".join(writer.texts))
            last = [self._token_event(token, native) for token in chunk.tokens[:-1]]
            final = {"generated_text": self._shown_text(native, whole), "details": details}
            final = (self._token_fields(chunk.tokens[-1], native) if chunk.tokens else {"token": None}) | final
            if sent.receipt:
                (final if details is None else details)["receipt"] = await self._service.receipts.of(generation)
            last.append(event(final))
            yield b"".join(last)
        except RouterError as error:
            request.state.failure = error
            yield event(lorax_body(error))

    async def _prepare(
        self, request: Request, native: GenerateRequest, timing: Timing, *, streaming: bool
    ) -> PreparedRequest:
        """Raises RouterError."""
        fields = native.to_request(self._service.config, streaming=streaming)
        prompts = LoraxPrompt(self._service, native, self._service.caller(request).identity)
        return await prepare(self._service, request, fields, prompts, timing)

    @staticmethod
    def _shown_text(native: GenerateRequest, whole: Completed) -> str:
        return native.text + whole.text if native.parameters.return_full_text else whole.text

    def _details(
        self, native: GenerateRequest, sent: GenerationRequest, whole: Completed, others: list[Completed]
    ) -> dict[str, Any]:
        counts = {"prompt_tokens": len(sent.prompt_ids), "generated_tokens": len(whole.tokens)}
        counts["skipped_tokens"] = whole.num_skipped
        details = self._sequence(native, sent, whole, counts)
        if others:
            details["best_of_sequences"] = [
                {
                    "generated_text": self._shown_text(native, other),
                    **self._sequence(native, sent, other, {"generated_tokens": len(other.tokens)}),
                }
                for other in others
            ]
        return details

    def _sequence(
        self, native: GenerateRequest, sent: GenerationRequest, whole: Completed, counts: dict[str, int]
    ) -> dict[str, Any]:
        """What `details` and each of `best_of_sequences` have in common, in LoRAX's order; `top_tokens` is TGI's."""
        shown = [self._token_fields(token, native) for token in whole.tokens]
        top_tokens = (
            {"top_tokens": [fields["top_tokens"] for fields in shown]} if native.parameters.top_n_tokens else {}
        )
        return {
            "finish_reason": whole.finish_reason.value,
            **counts,
            "seed": whole.seed if sent.sampling.do_sample else None,
            "prefill": [
                {"id": token_id, "text": text, "logprob": None if logprob is None else round(logprob, 7)}
                for token_id, text, logprob in (() if whole.prefill is None else whole.prefill.tokens())
            ],
            "tokens": [fields["token"] for fields in shown],
            **top_tokens,
        }

    def _token_fields(self, token: OutputToken, native: GenerateRequest) -> dict[str, Any]:
        """`token`, and TGI's `top_tokens` where asked for."""
        parameters = native.parameters
        fields: dict[str, Any] = {"token": token_fields(token, parameters.return_k_alternatives or 0)}
        if parameters.top_n_tokens:
            special_ids = self._service.tokenizer.special_ids
            fields["top_tokens"] = [
                {"id": token_id, "text": text, "logprob": round(logprob, 7), "special": token_id in special_ids}
                for token_id, text, logprob in islice(token.alternatives or (), parameters.top_n_tokens)
            ]
        return fields

    def _token_event(self, token: OutputToken, native: GenerateRequest) -> bytes:
        """The event of any token but the last."""
        if token.alternatives is None:
            return token_event(token)
        return event(self._token_fields(token, native) | {"generated_text": None, "details": None})


def _speculation_details(generation: Generation) -> dict[str, Any]:
    """`details.speculation`, absent where the request could not speculate."""
    report = speculation_report([generation])
    return {} if report is None else {"speculation": report}


class PredictRoute:
    """`POST /predict`: from a prompt to a text, in the format of LLMSpeculativeSampling's server.

    Constants of that server are defaults here; every other field is one of `/generate`'s parameters.
    """

    def __init__(self, service: Service, native: NativeRoutes) -> None:
        self._service = service
        self._native = native

    async def predict(self, request: Request) -> Response:
        """Answers with a JSON string: the prompt and the generated text."""
        arrived_at = now()
        predict, native = self._read(request, await self._service.body(request))
        answer, headers = await self._native.generate_answer(request, native, arrived_at)
        headers |= ignored_fields(predict.ignored())
        return json_response(answer["generated_text"], headers)

    def _read(self, request: Request, body: dict[str, Any]) -> tuple[PredictRequest, GenerateRequest]:
        predict = PredictRequest.read(body)
        parameters = predict.parameters(body)
        caller = self._service.caller(request)
        filled = self._service.native_defaults(caller, {"parameters": parameters})["parameters"]
        most = self._service.config.speculative_tokens_max
        defaults = {**_PREDICT_DEFAULTS, "speculative_tokens": min(_PREDICT_TOKENS, most)}
        filled = {**defaults, **{name: value for name, value in filled.items() if value is not None}}
        return predict, GenerateRequest.read({"inputs": predict.prompt, "parameters": filled})


async def _only(item: bytes) -> AsyncGenerator[bytes, None]:
    yield item


def token_fields(token: OutputToken, num_alternatives: int) -> dict[str, Any]:
    """LoRAX's token. A logprob of minus infinity becomes null, since JSON cannot represent it."""
    shown: dict[str, Any] = {
        "id": token.id,
        "text": token.text,
        "logprob": round(token.logprob, 7),
        "special": token.special,
    }
    if num_alternatives and token.alternatives is not None:
        shown["alternative_tokens"] = _alternatives_json(token.alternatives.first(num_alternatives))
    shown["skipped"] = token.skipped
    shown["source"] = SOURCE_NAMES[token.source]
    return shown


class _AlternativeFormats(dict[int, bytes]):
    """LoRAX's JSON of each token of a tokenizer as an alternative, with `%.7f` for its log probability."""

    of: ClassVar[WeakKeyDictionary[Tokenizer, Self]] = WeakKeyDictionary()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text_of = tokenizer.vocabulary.text

    def __missing__(self, token_id: int) -> bytes:
        if len(self) >= _MAX_FORMATS:
            self.clear()
        text = orjson.dumps(self._text_of(token_id)).replace(b"%", b"%%")
        self[token_id] = made = b'{"id":%d,"text":%b,"logprob":%%.7f}' % (token_id, text)
        return made


_MAX_FORMATS = 1 << 16


def _alternatives_json(alternatives: Alternatives) -> orjson.Fragment:
    """LoRAX's list of alternatives, as JSON. A token may have 256: formatted by hand, which takes 0.4 of the time."""
    formats = _AlternativeFormats.of.get(alternatives.tokenizer)
    if formats is None:
        formats = _AlternativeFormats.of[alternatives.tokenizer] = _AlternativeFormats(alternatives.tokenizer)
    entries = b",".join(map(formats.__getitem__, alternatives.ids)) % tuple(alternatives.logprobs)
    return orjson.Fragment(b"[%b]" % entries.replace(b'"logprob":-inf}', b'"logprob":null}'))


def listed(report: ReportFields, num_alternatives: int | None, tokens: list[OutputToken]) -> dict[str, Any]:
    """The tokens of a choice of OpenAI's routes in the forms that its request asks for: ids, LoRAX's details."""
    ids = {"token_ids": [token.id for token in tokens]} if report.token_ids else {}
    if not report.tokens:
        return ids
    count = len(report.logprob_token_ids) or num_alternatives or 0
    return {**ids, "tokens": [token_fields(token, count) for token in tokens]}


class _TokenEvents(EventWriter):
    """One event for each token."""

    def event_of(self, token_id: int, text: str, logprob: float) -> bytes:
        """The event of one token."""
        return _TOKEN_EVENT % (token_id, orjson.dumps(text), _number(logprob), _PLAIN)


def _number(logprob: float) -> bytes:
    return orjson.dumps(round(logprob, 7))


def token_event(token: OutputToken) -> bytes:
    """The event of a token without alternatives: formatted by hand, which halves the time per token."""
    flags = b"true" if token.special else b"false", b"true" if token.skipped else b"false"
    source = SOURCE_NAMES[token.source].encode()
    return _TOKEN_EVENT % (token.id, orjson.dumps(token.text), _number(token.logprob), _FLAGS % (*flags, source))

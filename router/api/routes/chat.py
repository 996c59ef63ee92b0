"""`/v1/chat/completions`: messages through the model's chat template, answers and streams in OpenAI's shapes."""

from collections.abc import Iterator
from typing import Any

from lorikeet.router.api.answer_parts import Completed, VisibleTokens
from lorikeet.router.api.prepare import Prompt, Prompts
from lorikeet.router.api.routes.native import listed
from lorikeet.router.api.routes.openai import LOWEST_LOGPROB, OpenAIPrompts, OpenAIRoute
from lorikeet.router.api.service import Service
from lorikeet.router.errors import ChatTemplateError
from lorikeet.router.output.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Finish,
    Message,
    ReasoningDelta,
    ToolCallBegin,
)
from lorikeet.router.output.outputs import Prepared
from lorikeet.router.requests.request import Adapter, Caller, FinishReason, OutputChunk, OutputToken
from lorikeet.router.schemas.chat import Conversation, ToolFields
from lorikeet.router.schemas.grammar import GrammarFields
from lorikeet.router.schemas.openai import ChatCompletionRequest, ChatFields, check_texts
from lorikeet.router.text.tokenizer import Tokenizer


async def render(
    service: Service,
    conversation: Conversation,
    tools: ToolFields,
    grammar: GrammarFields | None,
    adapter: Adapter | None,
    caller: Caller,
) -> Prepared:
    """The prompt and the reader of a conversation; `grammar` is that of its text. Raises RouterError."""
    check_texts(conversation.documents, service.tokenizer.length, service.config, "documents")
    return await service.outputs.prepare(adapter, conversation, tools, grammar, caller.identity)


class ChatPrompt(OpenAIPrompts):
    """One prompt, rendered from the messages with the adapter's chat template."""

    needs_adapter = True

    def __init__(self, service: Service, params: ChatFields, caller: Caller) -> None:
        super().__init__(service, params, caller)
        self._chat = params

    async def tokenize(self, adapter: Adapter | None, tokenizer: Tokenizer) -> list[Prompt]:
        params, service, conversation = self._chat, self._service, self._chat.conversation
        if not params.prompt.keeps_last:
            check_texts(conversation.texts, service.tokenizer.length, service.config, "messages")
        prepared = await render(service, conversation, params.tools, params.fields.grammar, adapter, self._caller)
        ids = await self._tokenized(prepared.prompt.text, "messages", tokenizer)
        if not ids:
            raise ChatTemplateError("the prompt has no tokens")
        return [Prompt(ids, prepared.prompt.text, prepared, tuple(conversation.ignored(prepared.prompt.unread)))]


class ChatRoute(OpenAIRoute[ChatFields]):
    """One prompt per request, rendered from its messages."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def _read(self, body: dict[str, Any], caller: Caller) -> ChatFields:
        config = self._service.config
        return ChatCompletionRequest.read(self._service.openai_defaults(caller, body), config).to_request(config)

    def _prompts(self, params: ChatFields, caller: Caller) -> Prompts:
        return ChatPrompt(self._service, params, caller)

    def _prompt_fields(self, params: ChatFields, prompts: list[Prompt]) -> dict[str, Any]:
        return {"prompt_token_ids": prompts[0].ids} if params.report.token_ids else {}

    def _answer_fields(self, params: ChatFields, sequences: list[Completed]) -> dict[str, Any]:
        return self._prompt_logprobs_of(params, sequences[0])

    def _choice(self, params: ChatFields, prompt: Prompt, whole: Completed) -> dict[str, Any]:
        return {
            "index": 0,
            "message": _message(whole.message),
            "finish_reason": whole.message.finish.kind.value,
            "logprobs": self._logprobs(params, whole.tokens, whole.text, whole.finish_reason, VisibleTokens()),
            "stop_reason": whole.stop_reason,
            **listed(params.report, params.num_logprobs, whole.tokens),
        }

    def _text_choice(self, text: str) -> dict[str, Any]:
        return _delta(0, {"content": text})

    def _first_choices(self, num_choices: int) -> list[dict[str, Any]]:
        return [_delta(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def _chunk_choices(
        self, params: ChatFields, index: int, chunk: OutputChunk, visible: VisibleTokens, events: list[Event]
    ) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs(params, chunk.tokens, chunk.text, chunk.finish_reason, visible)
        if logprobs is not None and not logprobs["content"]:
            logprobs = None
        listing = listed(params.report, params.num_logprobs, chunk.tokens) if chunk.tokens else {}
        deltas = [delta for event in events if (delta := _delta_of(event)) is not None]
        if not deltas and (logprobs is not None or listing):
            deltas.append({"content": ""})
        for delta in deltas:
            yield _delta(index, delta, logprobs=logprobs) | listing
            logprobs, listing = None, {}
        if events and isinstance(last := events[-1], Finish):
            yield _delta(index, {}, last.kind.value) | {"stop_reason": last.stop_reason}

    def _logprobs(
        self,
        params: ChatFields,
        tokens: list[OutputToken],
        text: str,
        finish: FinishReason | None,
        visible: VisibleTokens,
    ) -> dict[str, Any] | None:
        """`logprobs` of a choice, for its visible tokens; None where they are not asked for."""
        if params.num_logprobs is None:
            return None
        content = []
        for token, _ in visible.take(tokens, text, finish):
            entry = self._entry(params, token.id, token.logprob)
            entry["top_logprobs"] = [self._entry(params, other, value) for other, _, value in token.alternatives or ()]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, params: ChatFields, token_id: int, logprob: float) -> dict[str, Any]:
        vocabulary = self._service.tokenizer.vocabulary
        text = self._service.tokenizer.token_text(token_id)
        raw = vocabulary.piece(token_id) if vocabulary.is_bytewise else text.encode()
        if params.report.tokens_as_ids:
            text = f"token_id:{token_id}"
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


def _delta(
    index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def _delta_of(event: Event) -> dict[str, Any] | None:
    """What an event adds to the message, in OpenAI's shape."""
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallBegin(index, identity, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": identity, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None


def _message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape; text that is empty next to calls is null."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": "assistant",
        "content": None if calls and not message.content else message.content,
        **({"reasoning_content": message.reasoning} if message.reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
        "refusal": None,
    }

"""`/tokenize` of LoRAX and vLLM, `/detokenize`, `/tokenizer_info`, and TGI's `/chat_tokenize`."""

from collections.abc import Callable
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.answer_parts import ignored_fields
from lorikeet.router.api.middleware import ErrorStyle
from lorikeet.router.api.prepare import check_ids
from lorikeet.router.api.routes.chat import render
from lorikeet.router.api.service import Routes
from lorikeet.router.api.streaming import ClientWatch
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.tokens import DetokenizeRequest, Tokenization, TokenizeChat, read_tokenize
from lorikeet.router.text.tokenizer import MAX_WHOLE_BYTES

T = TypeVar("T")
_AT_ONCE = 1000
"""Tokens that are written at once: orjson holds the GIL."""


class TokenRoutes(Routes):
    """The handlers; none of them sends anything to a shard."""

    async def tokenize(self, request: Request) -> Response:
        """LoRAX's list of vocabulary entries with their character offsets, or vLLM's object of token ids."""
        body = await self._service.body(request)
        if not body.keys().isdisjoint(("prompt", "messages")):
            request.state.error_style = ErrorStyle.OPENAI
        tokenization = read_tokenize(body, self._service.config)
        tokenizer, special = self._service.tokenizer, tokenization.add_special_tokens
        text = await self._text(request, tokenization)
        if tokenization.field == "inputs":
            content = await self._in_pool(request, text, lambda: _tokens_json(tokenizer.offsets(text, special)))
            return _json(content, tokenization.ignored)
        ids = await self._in_pool(request, text, lambda: tokenizer.ids(text, special))
        names = [tokenizer.vocabulary.raw(token_id) for token_id in ids] if tokenization.wants_names else None
        most = self._service.config.max_total_tokens
        answer = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": names}
        return _json(orjson.dumps(answer), tokenization.ignored)

    async def chat_tokenize(self, request: Request) -> Response:
        """TGI's: the prompt of a chat, and its tokens."""
        config = self._service.config
        tokenization = TokenizeChat.read(await self._service.body(request), config).to_request(config)
        tokenizer, special = self._service.tokenizer, tokenization.add_special_tokens
        text = await self._text(request, tokenization)
        tokens = await self._in_pool(request, text, lambda: _tokens_json(tokenizer.offsets(text, special)))
        shown = b'{"tokenize_response":' + tokens + b',"templated_text":' + orjson.dumps(text) + b"}"
        return _json(shown, tokenization.ignored)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body, tokenizer = DetokenizeRequest.read(await self._service.body(request)), self._service.tokenizer
        ids = body.token_ids(self._service.config)
        check_ids(self._service, ids, "tokens", tokenizer)
        text = await self._in_pool(request, ids, lambda: tokenizer.decode(ids))
        return _json(orjson.dumps({"prompt": text}), body.ignored())

    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's configuration with the chat template in use, as clients need to build prompts themselves."""
        return _json(orjson.dumps(self._service.tokenizer.information), [])

    async def _text(self, request: Request, tokenization: Tokenization) -> str:
        """What is tokenized, rendered where it is a conversation. Raises RouterError."""
        service, text = self._service, tokenization.text
        caller = service.caller(request)
        if tokenization.conversation is not None:
            adapter = await service.selection.choose(tokenization.adapter, caller)
            prepared = await render(service, tokenization.conversation, tokenization.tools, None, adapter, caller)
            tokenization.ignored.extend(tokenization.conversation.ignored(prepared.prompt.unread))
            text = prepared.prompt.text
        limit = max(MAX_WHOLE_BYTES, service.config.max_input_length * service.tokenizer.length.max_bytes)
        if len(text) > limit or len(text.encode()) > limit:
            raise ValidationError(f"`{tokenization.field}` must have at most {limit} bytes", tokenization.field)
        return text

    async def _in_pool(self, request: Request, content: str | list[int], work: Callable[[], T]) -> T:
        """The result of `work`, in turns with other callers. Raises Overloaded."""
        pool = self._service.tokenizer.pool
        self._service.dispatcher.check_load(pool.num_pending)
        async with ClientWatch(request.receive):
            return await pool.run(work, self._service.caller(request).identity, len(content))


def _tokens_json(tokens: list[tuple[int, str, int, int]]) -> bytes:
    """LoRAX's list, some tokens at a time."""
    parts = []
    for first in range(0, len(tokens), _AT_ONCE):
        some = tokens[first : first + _AT_ONCE]
        shown = [{"id": token, "text": text, "start": start, "stop": stop} for token, text, start, stop in some]
        parts.append(orjson.dumps(shown)[1:-1])
    return b"[" + b",".join(parts) + b"]"


def _json(content: bytes, ignored: list[str]) -> Response:
    return Response(content, headers=ignored_fields(ignored), media_type="application/json")

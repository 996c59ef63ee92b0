"""Chooses the chat template of a request: the catalogue's, the adapter's own, or the base model's."""

import asyncio
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lorikeet.adapters.errors import AdapterError, AdapterTooLarge
from lorikeet.adapters.refs import Pin
from lorikeet.adapters.sized_cache import SizedCache
from lorikeet.adapters.sources.registry import Sources
from lorikeet.router.errors import ChatTemplateError, adapter_problem
from lorikeet.router.requests.request import Adapter
from lorikeet.router.schemas.chat import Conversation
from lorikeet.router.text.chat_template import Rendered, TemplateOptions, template_of
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.router.text.untrusted_templates import UntrustedTemplates

FIRST_FILES = frozenset({"chat_template.jinja"})
FILES = frozenset({"chat_template.json", "tokenizer_config.json"})
"""Next to one of the first they are optional."""
MAX_CACHED_BYTES = 64 << 20
MAX_BYTES = 1 << 20
"""Maximum bytes of a template file."""


@dataclass(frozen=True)
class OwnTemplates:
    """Templates that an adapter brings."""

    chat: str | None = None
    for_tools: str | None = None
    """The template for requests with tools, where there is another one."""
    response: Any = None
    """`response_template` of the tokenizer's configuration: how the output is parsed."""

    @cached_property
    def num_bytes(self) -> int:
        """What keeping them takes, with four bytes per character."""
        return 4 * (len(self.chat or "") + len(self.for_tools or "") + len(json.dumps(self.response)))


@dataclass(frozen=True)
class ChosenTemplate:
    """The template of a conversation."""

    source: str
    who: str = ""
    """Caller and source of a template that the operator did not write."""
    response: Any = None
    response_who: str = ""
    """Caller and source of a response template that the operator did not write."""


class Templates:
    """Chat templates of one router."""

    def __init__(self, tokenizer: Tokenizer, sources: Sources | None) -> None:
        self._tokenizer = tokenizer
        self._sources = sources
        self._own: SizedCache[Pin, OwnTemplates] = SizedCache(
            MAX_CACHED_BYTES, lambda pin, own: 2 * len(pin.id) + own.num_bytes
        )
        """Templates of adapters."""
        self._reading: dict[tuple[Pin, str | None], asyncio.Task[OwnTemplates]] = {}
        """By pin and token: requests that come meanwhile wait for the same."""
        self._untrusted = UntrustedTemplates()

    async def choose(
        self, adapter: Adapter | None, conversation: Conversation, caller: str, *, with_tools: bool = False
    ) -> ChosenTemplate:
        """The template of a conversation. Raises ChatTemplateError or a leaf of AdapterProblem."""
        tokenizer, base = self._tokenizer, self._tokenizer.template_source
        response = tokenizer.response_template
        if conversation.source is not None:
            return ChosenTemplate(conversation.source, f"{caller}|request", response)
        own, who = OwnTemplates(), ""
        if adapter is not None and adapter.chat_template is not None:
            return ChosenTemplate(adapter.chat_template, response=response)
        if adapter is not None:
            try:
                own = await self._of(adapter)
            except AdapterError as error:
                raise adapter_problem(error) from None
            # An owner's adapters, of a hub or bucket, share a budget.
            who = f"{caller}|{adapter.source}:{adapter.pins[0].id.partition('/')[0]}"
        response_who = "" if own.response is None else who
        response = response if own.response is None else own.response
        if own.chat is not None and own.chat != base:
            source = own.for_tools if with_tools and own.for_tools is not None else own.chat
            return ChosenTemplate(source, who, response, response_who)
        if base is None:
            raise ChatTemplateError("the model has no chat template")
        if with_tools and tokenizer.tool_template_source is not None:
            base = tokenizer.tool_template_source
        return ChosenTemplate(base, "", response, response_who)

    async def render(
        self, chosen: ChosenTemplate, messages: list[dict[str, Any]], options: TemplateOptions, caller: str
    ) -> Rendered:
        """The prompt. Raises ChatTemplateError."""
        if not chosen.who:
            return await self._tokenizer.render_chat(messages, options, caller=caller, source=chosen.source)
        named_tokens = self._tokenizer.named_tokens
        return await self._untrusted.render(chosen.source, named_tokens, messages, options, chosen.who)

    async def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        await self._untrusted.close()

    async def _of(self, adapter: Adapter) -> OwnTemplates:
        """The templates of the first of the adapter's parts that has any."""
        for pin in adapter.pins:
            if (own := self._own.get(pin)) is None:
                own = await self._shared(pin, adapter.token)
                self._own.put(pin, own)
            if own != OwnTemplates():
                return own
        return OwnTemplates()

    async def _shared(self, pin: Pin, token: str | None) -> OwnTemplates:
        """The templates of one adapter, read once however many requests ask for them."""
        task = self._reading.get((pin, token))
        if task is None:
            task = self._reading[pin, token] = asyncio.create_task(self._read(pin, token))
            task.add_done_callback(lambda _: self._reading.pop((pin, token), None))
        return await asyncio.shield(task)

    async def _read(self, pin: Pin, token: str | None) -> OwnTemplates:
        assert self._sources is not None
        source = self._sources[pin.source]
        files = await source.small_files(pin, token, FIRST_FILES, MAX_BYTES)
        try:
            files |= await source.small_files(pin, token, FILES, MAX_BYTES)
        except AdapterTooLarge:
            if not files:
                raise
        return await asyncio.to_thread(_find, files)


def _find(files: dict[str, bytes]) -> OwnTemplates:
    """The templates among an adapter's files; those that cannot be read are not there."""
    config, single = (_object(files.get(name)) for name in ("tokenizer_config.json", "chat_template.json"))
    response = config.get("response_template")
    try:
        if "chat_template.jinja" in files:
            return OwnTemplates(files["chat_template.jinja"].decode(), response=response)
        chat, for_tools = template_of(config, single), template_of(config, single, for_tools=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return OwnTemplates(response=response)
    return OwnTemplates(
        chat if isinstance(chat, str) else None, for_tools if isinstance(for_tools, str) else None, response
    )


def _object(content: bytes | None) -> dict[str, Any]:
    try:
        value = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Chooses the chat template of a request: the catalogue's, the adapter's own, or the base model's."""

import asyncio
import json
from collections import OrderedDict
from typing import Any

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.refs import Pin
from lorikeet.adapters.sources.registry import Sources
from lorikeet.router.errors import adapter_problem
from lorikeet.router.requests.adapter_ref import Adapter
from lorikeet.router.schemas.messages import Conversation
from lorikeet.router.text.chat_template import Rendered, template_of
from lorikeet.router.text.template_process import TemplateProcess
from lorikeet.router.text.tokenizer import Tokenizer

FILES = frozenset({"chat_template.jinja", "chat_template.json", "tokenizer_config.json"})
MAX_CACHED = 1024
MAX_LENGTH = 1 << 20


class Templates:
    """Of one router."""

    def __init__(self, tokenizer: Tokenizer, sources: Sources | None) -> None:
        self._tokenizer = tokenizer
        self._sources = sources
        self._own: OrderedDict[Pin, str | None] = OrderedDict()
        """Templates of adapters; None for adapters without one."""
        self._outside = TemplateProcess()

    async def render(self, adapter: Adapter | None, conversation: Conversation, caller: str) -> Rendered:
        """The prompt for a conversation. Raises ChatTemplateError or a leaf of AdapterProblem."""
        messages, options = conversation.messages, conversation.options
        if conversation.source is not None:
            return await self._outside.render(conversation.source, self._tokenizer.named_tokens, messages, options)
        if adapter is None:
            return await self._tokenizer.render_chat(messages, options, caller=caller)
        if adapter.chat_template is not None:
            return await self._tokenizer.render_chat(messages, options, caller=caller, source=adapter.chat_template)
        try:
            own = await self._of(adapter)
        except AdapterError as error:
            raise adapter_problem(error) from None
        if own is None or own == self._tokenizer.template_source:
            return await self._tokenizer.render_chat(messages, options, caller=caller)
        return await self._outside.render(own, self._tokenizer.named_tokens, messages, options)

    async def close(self) -> None:
        await self._outside.close()

    async def _of(self, adapter: Adapter) -> str | None:
        """The first template among the adapter's parts."""
        for pin in adapter.pins:
            if pin not in self._own:
                self._own[pin] = await self._read(pin, adapter.token)
            self._own.move_to_end(pin)
            while len(self._own) > MAX_CACHED:
                self._own.popitem(last=False)
            if (template := self._own.get(pin)) is not None:
                return template
        return None

    async def _read(self, pin: Pin, token: str | None) -> str | None:
        assert self._sources is not None
        files = await self._sources[pin.source].small_files(pin, token, FILES)
        return await asyncio.to_thread(_find, files)


def _find(files: dict[str, bytes]) -> str | None:
    """The default template among an adapter's files; None for one that cannot be read."""
    try:
        if "chat_template.jinja" in files:
            found: str | None = files["chat_template.jinja"].decode()
        else:
            config, single = (_object(files.get(name)) for name in ("tokenizer_config.json", "chat_template.json"))
            found = template_of(config, single)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) and len(found) <= MAX_LENGTH else None


def _object(content: bytes | None) -> dict[str, Any]:
    value = json.loads(content) if content else {}
    return value if isinstance(value, dict) else {}

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
from lorikeet.router.text.tokenizer import Tokenizer
from lorikeet.router.text.untrusted_templates import UntrustedTemplates

FIRST_FILES = frozenset({"chat_template.jinja"})
FILES = frozenset({"chat_template.json", "tokenizer_config.json"})
"""Read where there is none of the first."""
MAX_CACHED = 1024
MAX_BYTES = 1 << 20
"""Of a file."""


class Templates:
    """Of one router."""

    def __init__(self, tokenizer: Tokenizer, sources: Sources | None) -> None:
        self._tokenizer = tokenizer
        self._sources = sources
        self._own: OrderedDict[Pin, str | None] = OrderedDict()
        """Templates of adapters; None for adapters without one."""
        self._reading: dict[tuple[Pin, str | None], asyncio.Task[str | None]] = {}
        """By pin and token: requests that come meanwhile wait for the same."""
        self._untrusted = UntrustedTemplates()

    async def render(self, adapter: Adapter | None, conversation: Conversation, caller: str) -> Rendered:
        """The prompt for a conversation. Raises ChatTemplateError or a leaf of AdapterProblem."""
        messages, options = conversation.messages, conversation.options
        if conversation.source is not None:
            return await self._render_untrusted(conversation.source, conversation, f"{caller}|request")
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
        # An owner's adapters, of a hub or bucket, share a budget.
        owner = adapter.pins[0].id.partition("/")[0]
        return await self._render_untrusted(own, conversation, f"{caller}|{adapter.source}:{owner}")

    async def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        await self._untrusted.close()

    async def _render_untrusted(self, source: str, conversation: Conversation, who: str) -> Rendered:
        named_tokens = self._tokenizer.named_tokens
        return await self._untrusted.render(source, named_tokens, conversation.messages, conversation.options, who)

    async def _of(self, adapter: Adapter) -> str | None:
        """The first template among the adapter's parts."""
        for pin in adapter.pins:
            if pin not in self._own:
                self._own[pin] = await self._shared(pin, adapter.token)
            self._own.move_to_end(pin)
            while len(self._own) > MAX_CACHED:
                self._own.popitem(last=False)
            if (template := self._own.get(pin)) is not None:
                return template
        return None

    async def _shared(self, pin: Pin, token: str | None) -> str | None:
        """The template of one adapter, read once however many requests ask for it."""
        task = self._reading.get((pin, token))
        if task is None:
            task = self._reading[pin, token] = asyncio.create_task(self._read(pin, token))
            task.add_done_callback(lambda _: self._reading.pop((pin, token), None))
        return await asyncio.shield(task)

    async def _read(self, pin: Pin, token: str | None) -> str | None:
        assert self._sources is not None
        source = self._sources[pin.source]
        files = await source.small_files(pin, token, FIRST_FILES, MAX_BYTES)
        files = files or await source.small_files(pin, token, FILES, MAX_BYTES)
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
    return found if isinstance(found, str) else None


def _object(content: bytes | None) -> dict[str, Any]:
    value = json.loads(content) if content else {}
    return value if isinstance(value, dict) else {}

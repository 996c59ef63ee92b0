"""Chooses the tokenizer of a request: the base model's, with the tokens that its adapter adds."""

import asyncio
from collections import OrderedDict

from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.formats import added_tokens
from lorikeet.adapters.formats.added_tokens import Added
from lorikeet.adapters.refs import Pin
from lorikeet.adapters.sized_cache import SizedCache
from lorikeet.adapters.sources.registry import Sources
from lorikeet.router.errors import adapter_problem
from lorikeet.router.requests.request import Adapter
from lorikeet.router.text.tokenizer import Tokenizer

_MAX_CACHED_BYTES = 64 << 20
_TOKEN_BYTES = 512
"""What one added token takes."""
_MOST_TOKENIZERS = 8
"""Each has the base's vocabulary in memory; equal additions share one."""


class AdapterTokenizers:
    """Tokenizers of one router."""

    def __init__(self, tokenizer: Tokenizer, sources: Sources | None, num_extra: int) -> None:
        """`num_extra`: `--adapter-extra-vocab-size`; with 0, adapters that add tokens are rejected by the loader."""
        self._tokenizer, self._sources = tokenizer, sources
        self.is_used = num_extra > 0
        """Whether the adapter of a request must be known before its text becomes tokens."""
        self._added: SizedCache[Pin, Added] = SizedCache(
            _MAX_CACHED_BYTES, lambda pin, added: 2 * len(pin.id) + _TOKEN_BYTES * len(added.tokens)
        )
        self._made: OrderedDict[Added, Tokenizer] = OrderedDict()
        self._ids: dict[str, int] = {}
        """The base's tokens, once they are needed."""
        self._turn = asyncio.Lock()
        """One tokenizer is read at a time."""

    async def of(self, adapter: Adapter | None) -> Tokenizer:
        """Raises a leaf of AdapterProblem. Adapters that are merged add no tokens."""
        if adapter is None or adapter.merging is not None or not self.is_used:
            return self._tokenizer
        (pin,) = adapter.pins
        try:
            if (added := self._added.get(pin)) is None:
                added = await self._read(pin, adapter.token)
                self._added.put(pin, added)
            return await self._with(added) if added.tokens else self._tokenizer
        except AdapterError as error:
            raise adapter_problem(error) from None

    async def _read(self, pin: Pin, token: str | None) -> Added:
        assert self._sources is not None
        files = await self._sources[pin.source].small_files(pin, token, added_tokens.FILES)
        async with self._turn:
            if not self._ids:
                self._ids = await asyncio.to_thread(lambda: self._tokenizer.ids_by_token)
            return await asyncio.to_thread(added_tokens.read, files, self._ids)

    async def _with(self, added: Added) -> Tokenizer:
        async with self._turn:
            if added not in self._made:
                self._made[added] = await asyncio.to_thread(self._tokenizer.with_added, added)
                if len(self._made) > _MOST_TOKENIZERS:
                    self._made.popitem(last=False)
            self._made.move_to_end(added)
            return self._made[added]

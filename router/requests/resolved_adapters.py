"""Adapter and heads of one request, as they are resolved.

An adapter that has only heads does not change the base model's output: the shard runs such a request on the base model
with these heads, so that it shares the base model's pages.

An activated LoRA (aLoRA) applies from the last occurrence of its invocation tokens in the prompt on, as in PEFT. The
position is found in the original prompt only, so a request that continues on another shard has the same one. Without
an occurrence the base model answers.
"""

from collections.abc import Sequence

from lorikeet.proto.params import Composition
from lorikeet.router.errors import NoHeads, ValidationError
from lorikeet.router.requests.composition import composition_of, digest_of
from lorikeet.router.requests.request import Adapter, GenerationRequest, Loaded


class ResolvedAdapters:
    """Adapter and heads of one request, with their contents."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._adapter: Loaded | None = None
        self._heads: Loaded | None = None
        self._parts: list[Loaded] = []
        """Of a merge, those that are resolved."""
        self.composition: Composition | None = None
        """The sum that the shard computes from the parts of a merge."""
        self.most_composed = 0
        """Adapters whose sum every shard can compute; a merge of more needs a file."""
        self.max_total_tokens = 0
        """The least of all shards."""
        self.start = 0
        """Position of the first token that the adapter applies to; -1 where its invocation tokens are missing."""

    @property
    def is_activated(self) -> bool | None:
        """Whether an activated LoRA applies; None for any other adapter, and for none."""
        return None if self._adapter is None or not self._adapter.invocation_ids else self.start >= 0

    @property
    def prefix_content(self) -> str:
        """The content under whose digest the beginning of the prompt is cached."""
        return "" if self.start else self.digest

    @property
    def next_unresolved(self) -> Adapter | None:
        """The adapter whose content is needed next; None once everything is resolved."""
        request, heads = self._request, self._request.heads
        if request.adapter is not None and self._adapter is None:
            return self._next_part or request.adapter
        if heads is None or heads.content is not None or self._heads is not None:
            return None
        return heads.adapter

    @property
    def _next_part(self) -> Adapter | None:
        """The next part of a merge that shards may compute from its parts."""
        adapter = self._request.adapter
        if adapter is None or adapter.merging is None or adapter.merging.strategy not in ("cat", "linear"):
            return None
        if not len(self._parts) < len(adapter.parts) <= self.most_composed:
            return None
        return adapter.parts[len(self._parts)]

    @property
    def awaits_heads(self) -> bool:
        """Whether only the heads given in addition to the adapter are unresolved."""
        return self.next_unresolved is not None and (self._request.adapter is None or self._adapter is not None)

    def set_loaded(self, content: Loaded) -> None:
        """Set the content of `next_unresolved`."""
        if self.awaits_heads:
            self._heads = content
            return
        if self._next_part is not None:
            self._take_part(content)
            return
        self._adapter = content
        if content.invocation_ids:
            self.start = last_occurrence(self._request.prompt_ids, content.invocation_ids)

    def _take_part(self, content: Loaded) -> None:
        """One more part of a merge. If shards cannot add them up, the merge needs a file, and is resolved next."""
        adapter = self._request.adapter
        assert adapter is not None and adapter.merging is not None
        self._parts.append(content)
        if len(self._parts) < len(adapter.parts):
            return
        composition = composition_of(adapter.merging, self._parts)
        if composition is not None:
            tiers = {part.tier for part in self._parts}
            tier = "source" if "source" in tiers else self._parts[0].tier
            rank = sum(part.rank for part in self._parts)
            self._adapter, self.composition = Loaded(digest_of(composition), 0, rank, tier), composition

    def check(self) -> None:
        """Check that virtual tokens fit, and that the requested heads exist. Raises ValidationError."""
        num_tokens = len(self._request.prompt_ids) + self._request.max_new_tokens
        if self.num_virtual and num_tokens + self.num_virtual > self.max_total_tokens:
            raise ValidationError(
                f"prompt and output have {num_tokens} tokens and the adapter {self.num_virtual} virtual ones; at most"
                f" {self.max_total_tokens} fit in all: shorten the prompt or `max_new_tokens`"
            )
        heads = self._request.heads
        if heads is not None and self._heads is not None and not self._heads.num_heads:
            raise ValidationError(f"`heads_id` {heads.adapter.name[:256]} brings no heads", "heads_id")
        if self._request.needs_heads and not self.num_heads:
            raise NoHeads

    @property
    def _external_heads(self) -> Loaded | None:
        """The heads that replace the adapter's own: those that the request names, else the operator's."""
        heads = self._request.heads
        has_own = self._adapter is not None and self._adapter.num_heads > 0
        if heads is None or (heads.content is not None and has_own):
            return None
        return self._heads or heads.content

    @property
    def num_heads(self) -> int:
        """Number of heads that propose draft tokens for the request."""
        proposing = self._external_heads or self._adapter
        return 0 if proposing is None else proposing.num_heads

    @property
    def can_speculate(self) -> bool:
        """Whether any draft token can be proposed for the request."""
        return self._request.speculation.is_possible(self.num_heads > 0 or bool(self._request.learning_tenant))

    @property
    def digest(self) -> str:
        """Digest of the adapter's content, whatever it has; "" for the base model."""
        return "" if self._adapter is None else self._adapter.digest

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of all contents that are resolved."""
        heads = None if self._request.heads is None else self._request.heads.content
        contents = (*self._parts, self._adapter, self._heads, heads)
        return tuple(content.digest for content in contents if content is not None)

    @property
    def adapter_digests(self) -> tuple[str, ...]:
        """Of the adapter, or of the adapters of a sum."""
        if self.composition is not None:
            return self.composition.digests
        return (self.digest,) if self.digest else ()

    @property
    def num_virtual(self) -> int:
        """Virtual tokens before the prompt."""
        return 0 if self._adapter is None else self._adapter.num_virtual

    @property
    def tier(self) -> str:
        """Where the loader had the adapter's content from; "" for the base model."""
        return "" if self._adapter is None else self._adapter.tier

    @property
    def affinity_key(self) -> str:
        """The digest by which a shard is chosen; "" for any shard."""
        digest = self.adapter_digests[0] if self.adapter_digests and self.start >= 0 else ""
        return digest or ("" if self._heads is None else self._heads.digest)

    @property
    def adapter_pin(self) -> tuple[Adapter, str] | None:
        """The adapter that the shard applies to the base model, and its digest."""
        adapter = self._request.adapter
        if adapter is None or self._adapter is None or self._adapter.is_heads_only or self.start < 0:
            return None
        return adapter, self._adapter.digest

    @property
    def slot_pins(self) -> list[tuple[Adapter, str]]:
        """The contents that the shard needs in slots, with their digests."""
        adapter, heads = self.adapter_pin, self.heads_pin
        adapters = [] if adapter is None else [adapter]
        if adapter is not None and self.composition is not None:
            adapters = list(zip(adapter[0].parts, self.composition.digests, strict=True))
        return adapters if heads is None else [*adapters, heads]

    @property
    def heads_pin(self) -> tuple[Adapter, str] | None:
        """The adapter whose heads propose draft tokens, unless they are the adapter's own, and its digest."""
        if not self.num_heads or not self._request.speculation.num_heads:
            return None
        heads, external, adapter = self._request.heads, self._external_heads, self._request.adapter
        if heads is not None and external is not None:
            return heads.adapter, external.digest
        if adapter is None or self._adapter is None or not self._adapter.is_heads_only:
            return None
        return adapter, self._adapter.digest


def last_occurrence(token_ids: Sequence[int], invocation_ids: Sequence[int]) -> int:
    """Where `invocation_ids` begin for the last time in `token_ids`; -1 where they do not occur."""
    size = len(invocation_ids)
    for first in range(len(token_ids) - size, -1, -1):
        if token_ids[first] == invocation_ids[0] and tuple(token_ids[first : first + size]) == tuple(invocation_ids):
            return first
    return -1

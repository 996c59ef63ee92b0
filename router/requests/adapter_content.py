"""What a request's adapter and heads hold, as the loader tells one after the other, and what a shard is told of it.

Knows neither loader nor shard. An adapter that holds heads alone changes nothing of what the base model says: below the
router such a request runs on the bare base, and shares its pages, with the heads beside.
"""

from lorikeet.router.errors import NoHeads, ValidationError
from lorikeet.router.requests.adapter_ref import Adapter, Loaded
from lorikeet.router.requests.types import GenerationRequest


class ResolvedAdapters:
    """Of one request."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._adapter: Loaded | None = None
        self._heads: Loaded | None = None

    @property
    def missing(self) -> Adapter | None:
        """Whose content must be known next; None when all that is needed is."""
        request, heads = self._request, self._request.heads
        if request.adapter is not None and self._adapter is None:
            return request.adapter
        if heads is None or heads.content is not None or self._heads is not None:
            return None
        return heads.adapter

    @property
    def awaits_heads(self) -> bool:
        """Whether what is missing are the heads beside the adapter."""
        return self.missing is not None and (self._request.adapter is None or self._adapter is not None)

    def learn(self, content: Loaded) -> None:
        """What was `missing` holds this."""
        if self.awaits_heads:
            self._heads = content
        else:
            self._adapter = content

    def check(self) -> None:
        """Whether the heads that were asked for are there. Raises ValidationError."""
        heads = self._request.heads
        if heads is not None and self._heads is not None and not self._heads.num_heads:
            raise ValidationError(f"`heads_id` {heads.adapter.name[:256]} brings no heads", "heads_id")
        if self._request.speculation.needs_heads and not self.num_heads:
            raise NoHeads

    @property
    def _beside(self) -> Loaded | None:
        """The heads that guess instead of the adapter's own: those that the request names, else the operator's."""
        heads = self._request.heads
        brings_own = self._adapter is not None and self._adapter.num_heads > 0
        if heads is None or (heads.content is not None and brings_own):
            return None
        return self._heads or heads.content

    @property
    def num_heads(self) -> int:
        """Of the heads that guess for the request."""
        guessing = self._beside or self._adapter
        return 0 if guessing is None else guessing.num_heads

    @property
    def can_speculate(self) -> bool:
        """Whether anything can be guessed for the request."""
        return self._request.speculation.is_possible(self.num_heads > 0)

    @property
    def digest(self) -> str:
        """Of the adapter's content, whatever it holds; "" for the base model."""
        return "" if self._adapter is None else self._adapter.digest

    @property
    def home(self) -> str:
        """The digest by which a shard is chosen; "" for any shard."""
        return self.digest or ("" if self._heads is None else self._heads.digest)

    @property
    def adapter_pin(self) -> tuple[Adapter, str] | None:
        """What the shard runs the base model with, and its digest."""
        adapter = self._request.adapter
        if adapter is None or self._adapter is None or self._adapter.is_heads_only:
            return None
        return adapter, self._adapter.digest

    @property
    def heads_pin(self) -> tuple[Adapter, str] | None:
        """Whose heads guess, where those are not the adapter's own, and their digest."""
        if not self.num_heads or not self._request.speculation.num_heads:
            return None
        heads, beside, adapter = self._request.heads, self._beside, self._request.adapter
        if heads is not None and beside is not None:
            return heads.adapter, beside.digest
        if adapter is None or self._adapter is None or not self._adapter.is_heads_only:
            return None
        return adapter, self._adapter.digest

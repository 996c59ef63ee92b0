"""What a request's adapter and heads hold, as the loader tells one after the other, and what a shard is told of it.

Knows neither loader nor shard. An adapter that holds heads alone changes nothing of what the base model says: below the
router such a request runs on the bare base, and shares its pages, with the heads beside.
"""

from router.adapter import Adapter
from router.errors import NoHeads, ValidationError
from router.generation import GenerationRequest
from router.loader_client import Loaded


class Contents:
    """Of one request."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._adapter: Loaded | None = None
        self._heads: Loaded | None = None
        self._without_heads = False

    @property
    def missing(self) -> Adapter | None:
        """Whose content must be known next; None when all that is needed is."""
        request, heads = self._request, self._request.heads
        if request.adapter is not None and self._adapter is None:
            return request.adapter
        if heads is None or self._heads is not None or self._without_heads:
            return None
        brings_own = self._adapter is not None and self._adapter.num_heads > 0
        return None if heads.is_default and brings_own else heads.adapter

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

    def do_without_heads(self) -> None:
        """They cannot be had, and nobody asked for them by name."""
        self._without_heads = True

    def check(self) -> None:
        """Whether the heads that were asked for are there. Raises ValidationError."""
        heads = self._request.heads
        if heads is not None and not heads.is_default and self._heads is not None and not self._heads.num_heads:
            raise ValidationError(f"`heads_id` {heads.adapter.name[:256]} brings no heads", "heads_id")
        if self._request.speculation.needs_heads and not self.num_heads:
            raise NoHeads

    @property
    def num_heads(self) -> int:
        """Of the heads that guess for the request."""
        guessing = self._heads or self._adapter
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
        heads = self._request.heads
        beside = "" if heads is None or heads.is_default or self._heads is None else self._heads.digest
        return self.digest or beside

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
        if self._heads is not None and self._request.heads is not None:
            return self._request.heads.adapter, self._heads.digest
        adapter = self._request.adapter
        if adapter is None or self._adapter is None or not self._adapter.is_heads_only:
            return None
        return adapter, self._adapter.digest

"""What may guess for a request, and which of it does in a step. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lorikeet.shard.scheduler.request import DraftSource, Method, Request, Source
from lorikeet.shard.scheduler.speculation.lookup import Lookup

if TYPE_CHECKING:
    from lorikeet.shard.scheduler.speculation.draft_length import DraftState


@dataclass(slots=True)
class Offer:
    """Tokens that may come next in one request."""

    request: Request
    source: Source
    width: int
    """How many tokens at most."""
    draft_ids: list[int]
    """These tokens; empty where a draft model has yet to draw them."""
    draft_state: "DraftState | None" = None
    """What chooses how many of them are taken, where it learns."""
    is_long: bool = False
    """Whether lookup found a long stretch again."""


@dataclass(frozen=True)
class DraftSources:
    """The same for all requests of a shard."""

    max_batch_size: int = 32
    """With more running requests nothing is guessed."""
    ngram_min: int = 1
    ngram_max: int = 8
    ngram_long: int = 4
    """Tokens found again from which prompt lookup goes before heads and draft model, where all may guess."""
    has_draft_model: bool = False

    def may_draft(self, request: Request, num_running: int) -> bool:
        """Whether the request may have drafts now."""
        wanted = request.speculation
        if wanted.method is Method.OFF or num_running > self.max_batch_size:
            return False
        return wanted.num_tokens > 0 or self.num_heads(request) > 0

    def num_heads(self, request: Request) -> int:
        """DraftTokens of heads that the request takes in a step."""
        wanted = request.speculation
        return min(request.num_heads, wanted.num_heads) if wanted.takes_heads else 0

    def takes_draft_model(self, request: Request) -> bool:
        """Whether a draft model may guess for the request: heads go before it."""
        wanted = request.speculation
        if not (self.has_draft_model and wanted.num_tokens):
            return False
        return wanted.method is Method.DRAFT or (wanted.method is Method.AUTO and not self.num_heads(request))

    def offer(
        self, request: Request, room: int, takes_heads: bool = True, takes_draft_model: bool = True
    ) -> Offer | None:
        """What is guessed for the request next, at most `room` tokens: of `auto` what lookup finds again over a long
        stretch, else what heads say, else what a draft model will, else what lookup finds at all.
        """
        method, num_tokens = request.speculation.method, min(request.speculation.num_tokens, room)
        if method is Method.DRAFT:
            return self._drawn(request, num_tokens) if takes_draft_model else None
        if method is Method.MEDUSA:
            return self._told_by_heads(request, room) if takes_heads else None
        if method is Method.LOOKUP:
            return self._found(request, num_tokens)
        found = self._found(request, num_tokens)
        if found is not None and found.is_long:
            return found
        told = self._told_by_heads(request, room) if takes_heads else None
        return told or (self._drawn(request, num_tokens) if takes_draft_model else None) or found

    def make(self, request: Request) -> DraftSource:
        """What looks up the tokens of a request; it knows those so far."""
        return Lookup(request.token_ids, self.ngram_min, self.ngram_max, request.speculation.prediction_ids)

    def _found(self, request: Request, num_tokens: int) -> Offer | None:
        if num_tokens <= 0:
            return None
        if request.draft_source is None:
            request.draft_source = self.make(request)
        draft_ids = request.draft_source.draft_token(num_tokens)
        if not draft_ids:
            return None
        is_long = request.draft_source.match_length >= self.ngram_long
        return Offer(request, request.draft_source.source, len(draft_ids), draft_ids, is_long=is_long)

    def _told_by_heads(self, request: Request, room: int) -> Offer | None:
        draft_ids = list(request.head_ids[: max(0, min(room, self.num_heads(request)))])
        return Offer(request, Source.MEDUSA, len(draft_ids), draft_ids) if draft_ids else None

    def _drawn(self, request: Request, num_tokens: int) -> Offer | None:
        if num_tokens <= 0 or not self.takes_draft_model(request):
            return None
        return Offer(request, Source.DRAFT, num_tokens, [])

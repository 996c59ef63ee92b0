"""Which source proposes drafts for a request: prompt lookup, earlier outputs, Medusa heads or a draft model. Imports no
torch.
"""

from dataclasses import dataclass, field

from lorikeet.proto.params import Method
from lorikeet.shard.requests.request import Request
from lorikeet.shard.speculation.acceptance import DraftState
from lorikeet.shard.speculation.history import CONTEXT, NoHistory
from lorikeet.shard.speculation.lookup import Lookup
from lorikeet.shard.speculation.types import DraftSource, Source


@dataclass(slots=True)
class Offer:
    """Draft tokens that a step may verify for one request."""

    request: Request
    source: Source
    width: int
    """How many tokens at most."""
    draft_ids: list[int]
    """These tokens; empty where a draft model has yet to draw them."""
    draft_state: DraftState | None = None
    """What chooses how many of them are taken; None with a constant schedule."""
    is_long: bool = False
    """Whether prompt lookup or history found a long match."""


@dataclass(frozen=True)
class DraftSources:
    """What all requests of a shard have in common."""

    max_batch_size: int = 32
    """With more running requests nothing is drafted."""
    ngram_min: int = 1
    ngram_max: int = 8
    ngram_long: int = 4
    """Matched tokens from which prompt lookup and history come before heads and draft model, with method `auto`."""
    has_draft_model: bool = False
    history: NoHistory = field(default_factory=NoHistory)
    """The outputs of earlier requests."""
    most_on_device: int = 0
    """Most draft tokens of a step that the device makes for a request, 0 where the host makes all drafts."""

    def may_draft(self, request: Request, num_running: int) -> bool:
        """Whether the request may have drafts now."""
        params = request.speculation
        if num_running > self.max_batch_size:
            return False
        if request.constraint.proposes:
            return True
        if params.method is Method.OFF:
            return False
        return params.num_tokens > 0 or self.num_heads(request) > 0

    def are_on_device(self, request: Request) -> bool:
        """Whether the device makes the drafts of a running request: by prompt lookup in its own text, and by heads. The
        tokens of such a request depend on nothing that the host keeps.
        """
        params = request.speculation
        if not self.most_on_device or params.method in (Method.OFF, Method.DRAFT) or request.pooling is not None:
            return False
        is_plain = not (request.constraint.is_constrained or request.sampling.depends_on_history)
        needs_texts = bool(request.tenant or request.learner or params.prediction_ids)
        num_tokens = max(params.num_tokens, self.num_heads(request))
        return (
            is_plain
            and not needs_texts
            and not self.takes_draft_model(request)
            and (0 < num_tokens <= self.most_on_device)
        )

    def num_heads(self, request: Request) -> int:
        """Draft tokens that the request takes from heads in a step."""
        params = request.speculation
        return min(request.num_heads, params.num_heads) if params.takes_heads else 0

    def takes_draft_model(self, request: Request) -> bool:
        """Whether a draft model may propose for the request: heads come before it."""
        params = request.speculation
        if not (self.has_draft_model and params.num_tokens):
            return False
        return params.method is Method.DRAFT or (params.method is Method.AUTO and not self.num_heads(request))

    def offer(
        self, request: Request, room: int, takes_heads: bool = True, takes_draft_model: bool = True
    ) -> Offer | None:
        """The next drafts of the request, at most `room` tokens. Method `auto` takes the first of: a long match of
        prompt lookup or history, heads, the draft model, any match. What the grammar forces comes before all of them.
        """
        method, num_tokens = request.speculation.method, min(request.speculation.num_tokens, room)
        if forced := request.constraint.forced_ids()[:room]:
            return Offer(request, Source.GRAMMAR, len(forced), forced)
        if method is Method.OFF:
            return None
        takes_draft_model = takes_draft_model and num_tokens > 0 and self.takes_draft_model(request)
        drawn = Offer(request, Source.DRAFT, num_tokens, []) if takes_draft_model else None
        if method is Method.DRAFT:
            return drawn
        from_heads = self._from_heads(request, room) if takes_heads else None
        if method is Method.MEDUSA:
            return from_heads
        found = self._from_texts(request, num_tokens)
        if method is Method.LOOKUP or (found is not None and found.is_long):
            return found
        return from_heads or drawn or found

    def make(self, request: Request) -> DraftSource:
        """An index of the request's tokens so far."""
        return Lookup(request.token_ids, self.ngram_min, self.ngram_max, request.speculation.prediction_ids)

    def _from_lookup(self, request: Request, num_tokens: int) -> Offer | None:
        if num_tokens <= 0:
            return None
        if request.draft_source is None:
            request.draft_source = self.make(request)
        draft_ids = request.draft_source.propose(num_tokens)
        if not draft_ids:
            return None
        is_long = request.draft_source.match_length >= self.ngram_long
        return Offer(request, request.draft_source.source, len(draft_ids), draft_ids, is_long=is_long)

    def _from_texts(self, request: Request, num_tokens: int) -> Offer | None:
        """Offer of prompt lookup; where it has no long match, of history if that has a longer one."""
        found = self._from_lookup(request, num_tokens)
        if num_tokens <= 0 or not request.tenant or (found is not None and found.is_long):
            return found
        pair = (request.tenant, request.adapter_digest)
        draft_ids, length = self.history.propose(pair, request.token_ids, num_tokens)
        source = request.draft_source
        if not draft_ids or (found is not None and source is not None and length <= source.match_length):
            return found
        return Offer(request, Source.HISTORY, len(draft_ids), draft_ids, is_long=length >= self.ngram_long)

    def record(self, request: Request) -> None:
        """Add the output of a request that ends to the history of its tenant and adapter."""
        if request.tenant and request.num_output:
            pair = (request.tenant, request.adapter_digest)
            self.history.add(pair, request.token_ids[max(0, request.num_prompt - CONTEXT) :])

    def _from_heads(self, request: Request, room: int) -> Offer | None:
        draft_ids = list(request.head_ids[: max(0, min(room, self.num_heads(request)))])
        return Offer(request, Source.MEDUSA, len(draft_ids), draft_ids) if draft_ids else None


NO_DRAFT_SOURCES = DraftSources(max_batch_size=0)
"""Without speculative decoding."""

"""History drafts: what followed the newest tokens in the outputs of earlier requests of the same tenant and adapter.
Imports no torch.
"""

from collections.abc import Iterable
from typing import Self

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.requests.request import Request
from lorikeet.shard.speculation.drafter import Drafter, DraftSettings, Offer, Pages, kind_of
from lorikeet.shard.speculation.history_index import CONTEXT, HistoryIndex, Pair
from lorikeet.shard.speculation.lookup import reads_texts
from lorikeet.shard.speculation.states import NO_STATE, DraftKind


class HistoryDrafter(Drafter):
    """Consulted where prompt lookup has no long match."""

    value = pb.SOURCE_HISTORY

    def __init__(self, index: HistoryIndex, ngram_long: int) -> None:
        self._index, self._ngram_long = index, ngram_long

    @classmethod
    def make(cls, settings: DraftSettings, pages: Pages) -> Self | None:
        return None if settings.history is None else cls(settings.history, settings.ngram_long)

    def takes(self, request: Request) -> bool:
        return bool(request.tenant) and reads_texts(request)

    def propose(self, request: Request, room: int) -> Offer | None:
        num_tokens = min(request.speculation.num_tokens, room)
        draft_ids, length = self._index.propose(self.pair(request), request.token_ids, num_tokens)
        is_long = length >= self._ngram_long
        return Offer(request, self.value, len(draft_ids), draft_ids, NO_STATE, is_long, length) if draft_ids else None

    def kinds(self, request: Request) -> Iterable[DraftKind]:
        return [kind_of(request, self.value, is_long) for is_long in (False, True)]

    @staticmethod
    def pair(request: Request) -> Pair:
        """Whose outputs are searched."""
        return request.tenant, request.adapter_digest

    def finished(self, request: Request) -> None:
        """Add the output to the history of its tenant and adapter."""
        if request.tenant and request.num_output:
            self._index.add(self.pair(request), request.token_ids[max(0, request.num_prompt - CONTEXT) :])

"""Grammar drafts: tokens that must follow in a request's structured output, or that probably do. Imports no torch."""

from lorikeet.proto import shard_pb2 as pb
from lorikeet.shard.requests.request import Request
from lorikeet.shard.speculation.drafter import Drafter, Offer


class GrammarDrafter(Drafter):
    """Asks the grammar of each request."""

    value = pb.SOURCE_GRAMMAR

    def takes(self, request: Request) -> bool:
        return request.constraint.proposes

    def propose(self, request: Request, room: int) -> Offer | None:
        forced_ids = request.constraint.forced_ids()[:room]
        return Offer(request, self.value, len(forced_ids), forced_ids, is_long=True) if forced_ids else None

"""Medusa drafts: tokens that the heads of an adapter propose from the hidden state of the newest token (Cai et al.
2024, arXiv 2401.10774). The step before computes them (`shard/model/medusa/`). Imports no torch.
"""

from collections.abc import Sequence

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.learning import Pair
from lorikeet.shard.requests.request import Request, ScheduledRequest
from lorikeet.shard.speculation.drafter import Drafter, Offer


def num_heads(request: Request) -> int:
    """Draft tokens that the request takes from heads in a step."""
    params = request.speculation
    return min(request.num_heads, params.num_heads) if params.takes_heads else 0


class MedusaDrafter(Drafter):
    """Keeps what heads proposed in the newest step of each request."""

    value = pb.SOURCE_MEDUSA

    def takes(self, request: Request) -> bool:
        return num_heads(request) > 0

    def propose(self, request: Request, room: int) -> Offer | None:
        draft_ids = list(request.head_ids[: max(0, min(room, num_heads(request)))])
        return Offer(request, self.value, len(draft_ids), draft_ids) if draft_ids else None

    def max_tokens(self, request: Request) -> int:
        return num_heads(request)

    def drafts_on_device(self, request: Request) -> bool:
        return not request.learner

    def take_in(self, item: ScheduledRequest, is_offered: bool, num_left: int) -> int:
        if item.samples:
            item.expect_heads(num_heads(item.request))
        return 0

    def committed(self, item: ScheduledRequest, token_ids: Sequence[int], head_ids: Sequence[int]) -> None:
        if token_ids:
            first = (len(token_ids) - 1) * item.num_heads
            item.request.head_ids = head_ids[first : first + item.num_heads]

    def pause(self, request: Request) -> None:
        request.head_ids = ()

    def release(self, request: Request) -> None:
        request.head_ids = ()


def pair_of(request: Request) -> Pair | None:
    """The pair whose heads a request learns and uses; None if it takes no part."""
    if not request.learner or not request.speculation.takes_heads:
        return None
    return request.learner, request.adapter_digest

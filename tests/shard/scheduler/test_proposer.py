"""The load that a proposer passes to the draft lengths."""

from collections.abc import Sequence

from lorikeet.proto.params import Method, Schedule, Speculation
from lorikeet.shard.requests.request import ScheduledRequest
from lorikeet.shard.scheduler.budget import Budget, Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.proposer import Proposer
from lorikeet.shard.speculation.costs import Load
from lorikeet.shard.speculation.drafter import NO_ROWS, DraftSettings, Offer, RowOffers
from lorikeet.shard.speculation.states import Indices
from tests.shard.rig import make_request


def test_the_load_counts_all_scheduled_requests() -> None:
    proposer = Proposer(KvCache(9, 4), DraftSettings())
    loads: list[Load] = []
    choose = proposer.draft_length.choose

    def noted(offers: Sequence[Offer], load: Load, of_rows: RowOffers = NO_ROWS) -> tuple[list[int], Indices]:
        loads.append(load)
        return choose(offers, load, of_rows)

    proposer.draft_length.choose = noted  # type: ignore[method-assign]
    wanted = Speculation(Method.LOOKUP, 3, schedule=Schedule.AUTO)
    drafting = make_request(1, [5, 6, 7, 5], 10, speculation=wanted)
    drafting.is_fresh = False
    prompt = make_request(2, [1] * 9, 10)
    scheduled = [ScheduledRequest(drafting, 3, 4, samples=True), ScheduledRequest(prompt, 2, 6, samples=False)]
    proposer.propose(scheduled, 2, Budget(Limits(9, 2), {}))
    (load,) = loads
    assert (load.num_sampled, load.num_tokens, load.num_attended) == (1, 5, 4 + (3 + 4 + 5 + 6))

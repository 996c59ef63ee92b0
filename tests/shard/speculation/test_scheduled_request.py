"""Properties of a scheduled request."""

from lorikeet.shard.requests.request import ScheduledRequest, load_of
from tests.shard.rig import make_request


def test_each_token_attends_to_itself_and_all_before() -> None:
    request = make_request(1, [1, 2, 3], 10)
    assert load_of([ScheduledRequest(request, 0, 3, samples=True)]).num_attended == 1 + 2 + 3
    assert load_of([ScheduledRequest(request, 9, 10, samples=True)]).num_attended == 10
    drafted = ScheduledRequest(request, 9, 10, samples=True, draft_ids=[5, 6])
    assert load_of([drafted]).num_attended == 10 + 11 + 12

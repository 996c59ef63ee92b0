"""Schedules: what they learn, and that they end where the best fixed width is, by exact arithmetic over known costs."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lorikeet.proto.params import Method, Schedule, Speculation
from lorikeet.shard.requests.request import Request, ScheduledRequest, Source, load_of
from lorikeet.shard.speculation import length
from lorikeet.shard.speculation.costs import DraftCosts, Load, StepCosts
from lorikeet.shard.speculation.drafter import Offer, RowOffers, kind_of
from lorikeet.shard.speculation.length import DraftLengthController, NetworkLoad
from lorikeet.shard.speculation.states import RETRY
from tests.shard.rig import make_request

MOST = 8


def make(schedule: Schedule = Schedule.AUTO, number: int = 1) -> Request:
    method = Speculation(Method.DRAFT, MOST, schedule=schedule)
    return make_request(number, [1, 2, 3], 10_000, speculation=method, order=number)


def choose(draft_length: DraftLengthController, offers: Sequence[Offer], load: Load) -> list[int]:
    return draft_length.choose(offers, load)[0]


def observe(
    draft_length: DraftLengthController,
    step: Sequence[ScheduledRequest],
    seconds: float,
    draft_seconds: tuple[float, float],
) -> None:
    drawn = [item for item in step if item.num_drawn]
    of_networks = NetworkLoad(
        any(item.num_heads for item in step),
        len(drawn),
        sum(item.end for item in drawn),
        max((item.num_drawn for item in drawn), default=0),
    )
    draft_length.observe(step, load_of(step), seconds, draft_seconds, of_networks)


def skips(draft_length: DraftLengthController, request: Request) -> bool:
    """Whether the draft model is left out of the request's next step."""
    return not draft_length.may_try(request, kind_of(request, Source.DRAFT))


class World:
    """Drafts that are right with a given chance each, and steps with given costs."""

    def __init__(self, chance: float, slope: float, pass_cost: float, num_requests: int = 1) -> None:
        self.draft_length = DraftLengthController()
        self.requests = [make(number=i) for i in range(num_requests)]
        self.chance, self._slope, self._pass_cost = chance, slope, pass_cost
        self._random = random.Random(3)
        self.slow: dict[int, int] = {}
        """By number of drafts in a step: how many more such steps take longer by half."""
        self.widths: list[int] = []
        """Draft tokens in each step, summed over all requests."""

    def cost(self, num_drafts: int, depth: int) -> float:
        return 1 + self._slope * num_drafts + self._pass_cost * depth

    def run(self, num_steps: int) -> tuple[float, float]:
        """Tokens and seconds."""
        tokens = seconds = 0.0
        for _ in range(num_steps):
            wanting = [request for request in self.requests if not skips(self.draft_length, request)]
            offers = [Offer(request, Source.DRAFT, MOST, []) for request in wanting]
            widths = choose(self.draft_length, offers, Load(len(self.requests), len(self.requests))) if offers else []
            scheduled = [ScheduledRequest(request, 9, 10, samples=True) for request in self.requests]
            for offer, width in zip(offers, widths, strict=True):
                item = scheduled[self.requests.index(offer.request)]
                item.draft_state = offer.draft_state
                item.draft_ids, item.source = [0] * width, Source.DRAFT if width else Source.TARGET
            self.widths.append(sum(widths))
            cost = self.cost(sum(widths), max(widths, default=0))
            if self.slow.get(sum(widths), 0):
                self.slow[sum(widths)] -= 1
                cost += 0.5
            num_passes = max(widths, default=0)
            draft_seconds = (self._pass_cost * min(num_passes, 1), self._pass_cost * max(num_passes - 1, 0))
            observe(self.draft_length, scheduled, cost, draft_seconds)
            for item in scheduled:
                width, right = len(item.draft_ids), 0
                while right < width and self._random.random() < self.chance:
                    right += 1
                if width:
                    self.draft_length.verified(item, right, right < width)
                tokens += 1 + right
            seconds += cost
        return tokens, seconds

    def best_fixed(self) -> float:
        """Tokens per second of the best width for all, by arithmetic."""
        count = len(self.requests)
        gains = [sum(self.chance**j for j in range(1, width + 1)) for width in range(MOST + 1)]
        return max(count * (1 + gain) / self.cost(count * width, width) for width, gain in enumerate(gains))


@pytest.mark.parametrize(
    ("chance", "slope", "pass_cost", "num_requests"),
    [
        pytest.param(chance, slope, pass_cost, number, marks=() if (a + b + c + d) % 3 == 0 else pytest.mark.long)
        for a, chance in enumerate((0.0, 0.5, 0.9))
        for b, slope in enumerate((0.002, 0.05))
        for c, pass_cost in enumerate((0.02, 0.3))
        for d, number in enumerate((1, 8, 32))
    ],
)
def test_auto_is_as_fast_as_the_best_fixed_width(
    chance: float, slope: float, pass_cost: float, num_requests: int
) -> None:
    world = World(chance, slope, pass_cost, num_requests)
    tokens, seconds = world.run(300)
    assert tokens / seconds > 0.88 * world.best_fixed()  # learning included
    tokens, seconds = world.run(700)
    assert tokens / seconds > {0.0: 0.99, 0.5: 0.98, 0.9: 0.98}[chance] * world.best_fixed()


@pytest.mark.parametrize(
    "chance", [pytest.param(0.5, marks=pytest.mark.long), pytest.param(0.8, marks=pytest.mark.long), 0.94]
)
def test_auto_stays_as_fast_over_many_requests(chance: float) -> None:
    """One after the other, longer than costs are remembered: to try again what a step without drafts costs is no
    reason to stay without."""
    world = World(chance, 0.01, 0.11)
    world.run(300)
    tokens = seconds = 0.0
    for number in range(200):
        world.requests = [make(number=10 + number)]
        more = world.run(40)
        tokens, seconds = tokens + more[0], seconds + more[1]
    assert tokens / seconds > 0.98 * world.best_fixed()


def test_an_exploration_does_not_disable_new_requests() -> None:
    world = World(0.9, 0.01, 0.11)
    world.run(300)
    costs = world.draft_length.plain
    costs._samples = {number: seen for number, seen in costs._samples.items() if number > 4}
    costs._curve = None
    for _ in range(length.RETRY + 2):
        world.run(1)
        if world.widths[-1] == 0:
            break
    assert world.widths[-1] == 0  # a step without drafts, as if never measured, looks cheap
    assert not skips(world.draft_length, make(number=9))


@pytest.mark.parametrize("num_slow", [2, 6])
def test_steps_that_were_slow_at_first_are_tried_again(num_slow: int) -> None:
    world = World(0.94, 0.01, 0.11)
    world.slow = {MOST: num_slow}
    world.run(2000)
    assert world.widths[-1000:].count(MOST) > 900


def test_auto_finds_the_best_width_behind_a_stair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take tokens by sixteen, so that one draft more may be worse and two better."""

    class Stairs(World):
        def cost(self, num_drafts: int, depth: int) -> float:
            return 0.5 + 0.01 * (-(-(num_drafts + 8) // 16) * 16) + 0.05 * depth

    world = Stairs(0.94, 0.0, 0.05, num_requests=8)
    world.run(300)
    monkeypatch.setattr(
        world.draft_length, "_rates", lambda rows: np.full((len(rows), 2), 0.94)
    )  # else widths differ, and try more
    world.draft_length.plain = StepCosts()
    for num_drafts in 10 * (0, 24, 32, 40, 48, 64):
        world.draft_length.plain.observe(8 + num_drafts, 0, world.cost(num_drafts, 0))
    world.requests = [make(number=100 + i) for i in range(8)]
    world.run(300)  # five drafts give 0.96 of what seven do; on a line from six to eight those look worse
    tokens, seconds = world.run(1000)
    assert tokens / seconds > 0.98 * world.best_fixed()


def test_auto_resumes_when_drafts_become_right() -> None:
    world = World(0.0, 0.01, 0.05)
    world.run(1000)
    world.chance = 0.95
    world.run(700)
    tokens, seconds = world.run(300)
    assert tokens / seconds > 0.9 * world.best_fixed()


def test_a_new_request_learns_from_others() -> None:
    world = World(0.0, 0.05, 0.3, num_requests=4)
    world.run(300)
    newcomers = [make(number=10 + i) for i in range(12)]
    assert sum(skips(world.draft_length, newcomer) for newcomer in newcomers) >= 11, "one may try it"
    assert all(world.draft_length.is_idle(newcomer, kind_of(newcomer, Source.DRAFT)) for newcomer in newcomers[1:])


def test_a_long_text_has_fewer_drafts_where_attention_is_expensive() -> None:
    draft_length, chance, widths = (
        DraftLengthController(),
        random.Random(7),
        dict[int, list[int]](),
    )
    for number in range(60):
        request = make(number=number)
        for num_known in range(10, 510, 10):
            request.token_ids = [0] * num_known
            offer = Offer(request, Source.DRAFT, MOST, [])
            (width,) = choose(draft_length, [offer], Load(1, 1, num_known))
            item = ScheduledRequest(
                request, num_known - 1, num_known, True, [0] * width, Source.DRAFT, offer.draft_state
            )
            observe(draft_length, [item], 1 + 0.02 * width + 0.0005 * load_of([item]).num_attended, (0.0, 0.0))
            right = next((at for at in range(width) if chance.random() > 0.8), width)
            draft_length.verified(item, right, right < width)
            widths.setdefault(num_known, []).append(width)
    # by arithmetic: 8 and 3
    assert 7 <= sum(widths[20][-30:]) / 30 <= 8
    assert 2.5 <= sum(widths[490][-30:]) / 30 <= 4.5


def test_costs_of_steps_with_prompts_do_not_change_draft_lengths() -> None:
    """They have few rows for the head, and kernels of their own."""
    worlds = [World(0.9, 0.2, 0.1) for _ in range(2)]
    for world in worlds:
        world.run(300)
    for _ in range(30):
        observe(worlds[0].draft_length, [ScheduledRequest(make(number=7), 0, 1 + MOST, samples=True)], 0.5, (0.0, 0.0))
    for world in worlds:
        world.run(300)
    assert worlds[0].widths == worlds[1].widths


def test_decisions_hold_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0.9, 0.01, 0.1, num_requests=4)
    world.run(300)
    best, thought = world.draft_length._best, []
    monkeypatch.setattr(world.draft_length, "_best", lambda *args: thought.append(1) or best(*args))
    world.run(90)
    assert 90 / (length.RETRY + 1) - 1 <= len(thought) <= 90 / length.RETRY + 1


def test_a_decision_is_not_kept_for_another_request() -> None:
    """It decides itself, even where its row of statistics was another one's."""
    draft_length, lengths = DraftLengthController(), np.array([10])
    rows: list[int] = []
    for number in range(1, 9):
        request = make(number=number)
        rows.append(draft_length.row_of(request, kind_of(request, Source.LOOKUP)))
        own = np.array([number]), np.array([MOST]), np.array(rows[-1:]), lengths
        offers = RowOffers(*own, np.array([Source.LOOKUP]))
        for _ in range(20 + 3 * number):
            _, widths = draft_length.choose([], Load(1, 1), offers)
            draft_length.verified_rows(offers.admissions, offers.states, widths, np.array([False]))
            draft_length.observe([], Load(1, 1 + int(widths[0])), 1 + 0.01 * int(widths[0]), (0.0, 0.0))
            assert not draft_length.states.follows[rows[-1]]
        draft_length.forget(request)
        draft_length.observe([], Load(1, 1), 1.0, (0.0, 0.0))
    assert len({*rows}) == 1


def test_nothing_is_explored_in_steps_with_prompts() -> None:
    world = World(0.9, 0.01, 0.1)
    world.run(300)
    (request,) = world.requests
    offers = [Offer(request, Source.DRAFT, MOST, []) for _ in range(40)]
    assert len({tuple(choose(world.draft_length, [offer], Load(2, 50))) for offer in offers}) == 1


def test_fixed_drafts_of_long_texts_count_as_load() -> None:
    """With them a step takes so long that further drafts are cheap."""
    chosen: list[int] = []
    for num_known in (10, 10_000):
        draft_length = DraftLengthController()
        for step in range(400):
            num_tokens, num_attended = 2 + step % 20, 10 * (step // 20)
            draft_length.plain.observe(num_tokens, num_attended, 1.0 + 0.5 * num_tokens + 0.01 * num_attended)
        fixed = make(Schedule.CONSTANT, number=2)
        fixed.token_ids = [0] * num_known
        offers = [Offer(make(number=1), Source.LOOKUP, MOST, [5] * MOST), Offer(fixed, Source.LOOKUP, 2, [5] * 2)]
        chosen.append(choose(draft_length, offers, Load(2, 2))[0])
    assert chosen[0] < chosen[1] == MOST


def test_drafts_of_other_requests_count() -> None:
    """A step that is full to a stair with fixed drafts has no room below it."""
    chosen: list[int] = []
    for num_constant in (0, 7):
        draft_length = DraftLengthController()
        for num_tokens in 10 * (2, 9, 10, 18):
            draft_length.plain.observe(num_tokens, 0, 1.0 if num_tokens < 10 else 9.0)
        offers = [Offer(make(number=1), Source.LOOKUP, MOST, [5] * MOST)]
        if num_constant:
            fixed = make(Schedule.CONSTANT, number=2)
            offers.append(Offer(fixed, Source.LOOKUP, num_constant, [5] * num_constant))
        chosen.append(choose(draft_length, offers, Load(2, 2))[0])
    assert chosen == [7, 0]


@pytest.mark.parametrize("with_prompts", [False, True])
def test_steps_with_prompts_have_separate_costs(with_prompts: bool) -> None:
    draft_length = DraftLengthController()
    for num_tokens, seconds in 10 * ((1, 1.0), (9, 11.0), (50, 11.0), (58, 121.0)):
        draft_length.plain.observe(num_tokens, 0, seconds)
        draft_length.with_prompts.observe(num_tokens, 0, 1.0)
    offer = Offer(make(), Source.LOOKUP, MOST, [5] * MOST)
    assert choose(draft_length, [offer], Load(1, 50 if with_prompts else 1)) == [MOST if with_prompts else 0]


def test_long_texts_make_the_draft_model_expensive() -> None:
    draft_length = DraftLengthController()
    for step in range(400):
        length = 100 * (step % 10)
        draft_length.plain.observe(1 + step % 9, 0, 1.0)
        draft_length.drafting.observe(1, length, (0.05 + length / 20_000, 0.05 + length / 20_000), 2)
    short, long = make(number=1), make(number=2)
    short.token_ids, long.token_ids = [0] * 10, [0] * 20_000
    widths = [choose(draft_length, [Offer(each, Source.DRAFT, MOST, [])], Load(1, 1))[0] for each in (short, long)]
    assert widths[0] > 2 and widths[1] == 0


def test_further_drafts_cost_what_further_passes_do() -> None:
    """Where the first pass takes most of the time, one draft is not worth it and many are; were all passes alike, each
    would look too dear.
    """
    draft_length = DraftLengthController()
    draft_length.plain.observe(1, 0, 1.0)
    for step in range(40):
        item = ScheduledRequest(make(), 9, 10, samples=True, draft_ids=[0] * (1 + step % 2), source=Source.DRAFT)
        observe(draft_length, [item], 2.0 + 0.01 * (step % 2), (1.0, 0.01 * (step % 2)))
    assert choose(draft_length, [Offer(make(), Source.DRAFT, MOST, [])], Load(1, 1)) == [MOST]
    assert draft_length.drafting.expected(1, 0, 3).tolist() == pytest.approx([0.0, 1.0, 1.01, 1.02])


def test_draft_passes_with_prompts_are_not_recorded() -> None:
    """The first one takes the prompts in."""
    draft_length = DraftLengthController()
    prompt = ScheduledRequest(make(number=2), 0, 9, samples=False)
    drafted = ScheduledRequest(make(), 9, 10, samples=True, draft_ids=[0], source=Source.DRAFT)
    observe(draft_length, [drafted, prompt], 9.0, (8.0, 0.0))
    assert not draft_length.drafting.first.is_known
    observe(draft_length, [drafted], 2.0, (1.0, 0.0))
    assert draft_length.drafting.expected(1, 0, 2).tolist() == [
        0.0,
        1.0,
        2.0,
    ]  # the further ones like the first, as yet


def test_heuristic_follows_its_rule() -> None:
    draft_length, request = DraftLengthController(), make(Schedule.HEURISTIC)
    widths = []
    for right in (0, 0, 99, 99, 0):
        offer = Offer(request, Source.DRAFT, MOST, [])
        (width,) = choose(draft_length, [offer], Load(1, 1))
        widths.append(width)
        item = ScheduledRequest(
            request, 9, 10, samples=True, draft_ids=[0] * width, source=Source.DRAFT, draft_state=offer.draft_state
        )
        draft_length.verified(item, min(right, width), right < width)
    assert widths == [8, 7, 6, 8, 8]


def test_constant_takes_all() -> None:
    draft_length, request = DraftLengthController(), make(Schedule.CONSTANT)
    assert choose(draft_length, [Offer(request, Source.DRAFT, MOST, [])], Load(1, 1)) == [MOST]
    assert not draft_length.is_used


def test_a_draft_model_that_does_not_pay_does_not_disable_lookup() -> None:
    """One kind of drafts is disabled without another."""
    draft_length = DraftLengthController()
    request = make_request(1, [1, 2], 100, speculation=Speculation(Method.AUTO, 4, schedule=Schedule.AUTO))
    for _ in range(30):
        offer = Offer(request, Source.DRAFT, 4, [])
        widths = [] if skips(draft_length, request) else choose(draft_length, [offer], Load(1, 1))
        item = ScheduledRequest(
            request,
            9,
            10,
            samples=True,
            draft_ids=[0] * sum(widths),
            source=Source.DRAFT,
            draft_state=offer.draft_state,
        )
        observe(draft_length, [item], 1.0 + 0.2 * item.num_tokens, (0.5, 0.0))
        if item.draft_ids:
            draft_length.verified(item, 0, was_rejected=True)
    assert skips(draft_length, request)
    found = Offer(request, Source.LOOKUP, 4, [1, 2, 3, 4], is_long=True)
    assert choose(draft_length, [found], Load(1, 1))[0] > 0


def test_expensive_drafts_are_retried_under_a_lighter_load() -> None:
    world = World(0.9, 0.05, 1.0, num_requests=32)
    world.run(300)
    assert all(skips(world.draft_length, request) for request in world.requests)
    newcomers = [make(number=100 + i) for i in range(16)]
    assert sum(skips(world.draft_length, newcomer) for newcomer in newcomers) == 15
    del world.requests[1:]
    found = Offer(world.requests[0], Source.LOOKUP, 1, [5])
    choose(world.draft_length, [found], Load(1, 1))  # a step of one request
    assert not skips(world.draft_length, world.requests[0])


def test_requests_disabled_by_a_prior_start_when_drafts_pay_for_others() -> None:
    """A moment in which the machine was slow must not leave a whole generation of requests without drafts."""
    world = World(0.9, 0.01, 1.0, num_requests=16)
    world.run(300)
    world.requests = [make(number=100 + i) for i in range(16)]
    assert sum(skips(world.draft_length, newcomer) for newcomer in world.requests) == 15
    world._pass_cost, world.draft_length.drafting = 0.02, DraftCosts()  # it was but a moment
    world.run(60)
    tokens, seconds = world.run(60)
    assert tokens / seconds > 0.95 * world.best_fixed()


def test_requests_disabled_by_a_prior_start_when_the_others_have_ended() -> None:
    world = World(0.9, 0.05, 1.0, num_requests=32)
    world.run(300)
    world.requests = [make(number=100 + i) for i in range(15)]
    assert all(skips(world.draft_length, newcomer) for newcomer in world.requests)
    del world.requests[1:]
    world.run(1)
    assert not skips(world.draft_length, world.requests[0])


def test_a_request_once_disabled_by_a_prior_decides_for_itself_later() -> None:
    """Once drafts pay for others, what it waited so far does not count."""
    world = World(0.9, 0.05, 1.0, num_requests=32)
    world.run(300)
    newcomer = make(number=100)
    kind = kind_of(newcomer, Source.DRAFT)
    assert all(skips(world.draft_length, newcomer) for _ in range(100))
    world.draft_length.states.wake(np.array([world.draft_length._group(kind)]))
    assert not skips(world.draft_length, newcomer)
    offer = Offer(newcomer, Source.DRAFT, MOST, [])
    for _ in range(2):  # it thinks it over once
        assert not skips(world.draft_length, newcomer)
        assert choose(world.draft_length, [offer], Load(32, 32)) == [0]
    assert skips(world.draft_length, newcomer)


def test_after_a_rest_one_new_request_tries_for_all() -> None:
    world = World(0.9, 0.05, 1.0, num_requests=32)
    world.run(300)
    newcomers = [make(number=100 + i) for i in range(8)]
    assert all(skips(world.draft_length, newcomer) for newcomer in newcomers)
    group = world.draft_length._group(kind_of(newcomers[0], Source.DRAFT))
    world.draft_length._step = int(world.draft_length.states.idle_until[group])
    assert sum(skips(world.draft_length, newcomer) for newcomer in newcomers) == 7


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_draft_accepted_after_a_rest_ends_the_rest(num_requests: int) -> None:
    """Also where the next step was decided before it was known."""
    draft_length = DraftLengthController()
    for num_tokens in 20 * tuple(range(1, 2 * num_requests + 1)):
        # drafts would pay if all were accepted
        draft_length.plain.observe(num_tokens, 0, 1.0 + 0.7 * max(0, num_tokens - num_requests) / num_requests)
    requests = [make(number=number) for number in range(num_requests)]
    offers = [Offer(request, Source.LOOKUP, 1, [5]) for request in requests]
    load, verified = Load(num_requests, num_requests), list[Offer]()
    for _ in range(10 * RETRY):
        widths = choose(draft_length, offers, load)
        draft_length.observe([], load, 1.0, (0.0, 0.0))
        for offer in verified:
            item = ScheduledRequest(offer.request, 9, 10, samples=True, draft_ids=[5], draft_state=offer.draft_state)
            draft_length.verified(item, 0, True)
        verified = [replace(offer) for offer, width in zip(offers, widths, strict=True) if width]
        if verified and all(draft_length.states.is_tried[offer.draft_state] for offer in verified):
            break
    assert len(verified) == num_requests
    assert choose(draft_length, offers, load) == [0] * num_requests
    kind = kind_of(requests[0], Source.LOOKUP)
    assert all(draft_length.is_idle(request, kind) for request in requests)
    for offer in verified:
        item = ScheduledRequest(offer.request, 9, 10, samples=True, draft_ids=[5], draft_state=offer.draft_state)
        draft_length.verified(item, 1, False)
    assert not any(draft_length.is_idle(request, kind) for request in requests)


def test_a_step_of_prompts_alone_is_no_lighter_load() -> None:
    world = World(0.9, 0.05, 1.0, num_requests=32)
    world.run(300)
    prompts = [ScheduledRequest(make(number=200 + i), 0, 9, samples=False) for i in range(32)]
    observe(world.draft_length, prompts, 5.0, (0.0, 0.0))
    assert skips(world.draft_length, make(number=300))


def test_drafts_that_pay_for_one_request_are_too_expensive_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_length, requests = DraftLengthController(), [make(number=1), make(number=2)]
    monkeypatch.setattr(draft_length, "_best", lambda offers, *_: np.array([4, 0])[: len(offers.states)])
    for _ in range(8):
        wanting = [request for request in requests if not skips(draft_length, request)]
        choose(draft_length, [Offer(request, Source.DRAFT, MOST, []) for request in wanting], Load(2, 2))
    assert not skips(draft_length, make(number=3))


def test_statistics_of_adapters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "MAX_GROUPS", 5)
    world = World(0.9, 0.1, 0.1, num_requests=12)
    for number, request in enumerate(world.requests):
        request.adapter_digest = f"adapter {number}"
    world.run(30)
    assert 0 < len(world.draft_length._groups) <= 5
    for request in world.requests:
        world.draft_length.forget(request)
    assert not world.draft_length._rows


def test_plain_steps_show_that_steps_with_heads_are_fast_again() -> None:
    """Else heads that looked slow once would not run again, and stay slow."""
    draft_length = DraftLengthController()
    for number, (has_heads, slowness) in enumerate([(True, 4.0), (False, 4.0)] * 20 + [(False, 1.0)] * 60):
        item = ScheduledRequest(make(number=number), 9, 10, True, [], Source.MEDUSA, None)
        item.num_heads = 3 * has_heads
        observe(draft_length, [item], slowness * (1 + 0.1 * has_heads), (0.0, 0.0))
    assert draft_length.with_heads.estimate(1, 10) == pytest.approx(1.1, rel=0.1)

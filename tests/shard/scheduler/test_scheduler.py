"""Any sequence of arrivals, ends and steps: every request's text is what it is alone, and every page comes back."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorikeet.proto.params import LogprobParams
from lorikeet.shard.requests.request import FinishReason, Request, ScheduledRequest
from lorikeet.shard.scheduler.budget import Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler
from tests.shard.fake_model import extend, generate_alone, next_token

STOP_IDS = frozenset({3, 17})


@dataclass
class Device:
    """Executes launched scheduled in order; its sampled tokens are known to the scheduler only at commit."""

    cache: KvCache
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)

    def run(self, scheduled: list[ScheduledRequest]) -> list[int | None]:
        written: set[tuple[int, int]] = set()
        sampled: list[int | None] = []
        for item in scheduled:
            sampled.append(self._run_one(item, written))
        return sampled

    def _run_one(self, item: ScheduledRequest, written: set[tuple[int, int]]) -> int | None:
        request, page_size = item.request, self.cache.page_size
        for position in range(item.start, item.end):
            slot = (request.page_ids[position // page_size], position % page_size)
            assert slot not in written, "two requests write one slot"
            assert slot[0] not in self.cache._hash_by_page, "a published page is written"
            written.add(slot)
            is_known = position < len(request.token_ids)
            token_id = request.token_ids[position] if is_known else self.newest[request.row]
            before = position - 1
            state = self.memory[request.page_ids[before // page_size], before % page_size] if position else 0
            self.memory[slot] = extend(state, token_id)
        if not item.samples:
            return None
        seen = [self.memory[request.page_ids[p // page_size], p % page_size] for p in range(item.end)]
        self.newest[request.row] = next_token(seen)
        return self.newest[request.row]


class SchedulerMachine(RuleBasedStateMachine):
    """The step loop without a model."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_tokens=st.integers(14, 50),
        step_tokens=st.sampled_from([1, 3, 7, 64]),
        max_running=st.integers(1, 5),
        chunked=st.booleans(),
        caching=st.booleans(),
        lag=st.integers(0, 1),
        adapter_prefill_tokens=st.sampled_from([None, 1, 3]),
        short_room=st.sampled_from([2, 256]),
    )
    def start(
        self,
        page_size: int,
        num_tokens: int,
        step_tokens: int,
        max_running: int,
        chunked: bool,
        caching: bool,
        lag: int,
        adapter_prefill_tokens: int | None,
        short_room: int,
    ) -> None:
        self.cache = KvCache(-(-num_tokens // page_size), page_size, caching)
        self.scheduler = Scheduler(
            self.cache,
            Limits(
                step_tokens,
                max_running,
                chunked,
                adapter_prefill_tokens=adapter_prefill_tokens,
                short_room=short_room,
            ),
        )
        self.device = Device(self.cache)
        self.lag = lag
        self.launched: list[tuple[list[ScheduledRequest], list[int | None]]] = []
        self.all: list[tuple[Request, list[int]]] = []
        self.now = 0.0
        self.was_isolated, self.others = False, list[Request]()

    @rule(
        stem=st.integers(0, 1),
        num_stem=st.integers(0, 12),
        tails=st.lists(st.lists(st.integers(0, 60), max_size=2), min_size=1, max_size=4),
        max_new_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "", "salt"]),
        kind=st.sampled_from(["plain", "plain", "plain", "scored", "short-lived"]),
        adapter=st.sampled_from(["", "", "a", "b"]),
        isolation_steps=st.sampled_from([0, 0, 0, 1, 3]),
        caller=st.sampled_from(["", "", "one", "two", "three"]),
    )
    def arrive(
        self,
        stem: int,
        num_stem: int,
        tails: list[list[int]],
        max_new_tokens: int,
        salt: str,
        kind: str,
        adapter: str,
        isolation_steps: int,
        caller: str,
    ) -> None:
        """A few requests at once that share the beginning of their prompts, or all of it."""
        for tail in tails:
            prompt_ids = [(7 * stem + i) % 61 for i in range(num_stem)] + (tail or [5])
            num_tokens = self.cache.num_pages * self.cache.page_size
            request = Request(
                key=(1, len(self.all)),
                token_ids=prompt_ids[-num_tokens + 1 :],
                num_prompt=len(prompt_ids[-num_tokens + 1 :]),
                max_new_tokens=max(1, min(max_new_tokens, num_tokens - len(prompt_ids))),
                stop_ids=STOP_IDS,
                cache_salt=salt,
                adapter_digest=adapter,
                logprobs=LogprobParams(prefill=kind == "scored"),
                deadline=self.now + 5 if kind == "short-lived" else None,
                isolation_steps=isolation_steps,
                caller=caller,
                share=2.0 if caller == "two" else 1.0,
            )
            self.all.append((request, list(request.token_ids)))
            self.scheduler.add(request)

    @precondition(lambda self: self.scheduler.requests)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        requests = list(self.scheduler.requests.values())
        self.scheduler.finish(requests[choice % len(requests)], FinishReason.ABORTED)

    @rule(num_turns=st.integers(1, 6))
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.step()

    @rule()
    def fail_a_step(self) -> None:
        """A step that writes nothing. Those before it are committed as always."""
        scheduled = self.scheduler.schedule()
        self.was_isolated, self.others = self.scheduler.is_isolated, []
        self.commit(0)
        for item in scheduled:
            self.scheduler.discard(item)

    def step(self) -> None:
        self.now += 1
        self.scheduler.expire(self.now)
        suspects = {
            request.key: request.isolation_steps
            for request in self.scheduler.requests.values()
            if request.isolation_steps
        }
        if self.scheduler.awaits_commit:  # as in the engine
            self.commit(0)
        self.scheduler.take_back()
        scheduled = self.scheduler.schedule()
        self.check_plan(scheduled)
        self.check_suspects(scheduled, suspects)
        if scheduled:
            self.launched.append((scheduled, self.device.run(scheduled)))
        may_lag = scheduled and not self.scheduler.is_isolated  # as in the engine
        self.commit(self.lag if may_lag else 0)

    def commit(self, num_open: int) -> None:
        while len(self.launched) > num_open:
            for item, token_id in zip(*self.launched.pop(0), strict=True):
                self.scheduler.commit(item, [] if token_id is None else [token_id])

    def check_suspects(self, scheduled: list[ScheduledRequest], suspects: dict[tuple[int, int], int]) -> None:
        """A suspect has its steps for itself; the first to come is done with them before another begins."""
        keys = [item.request.key for item in scheduled]
        assert self.scheduler.is_isolated == bool(suspects.keys() & set(keys))
        if self.scheduler.is_isolated:
            (item,) = scheduled
            waited = [request for request in self.others if not request.finish_reason and request.row >= 0]
            assert not self.was_isolated or not waited, "others had no turn"
            assert item.request.isolation_steps == suspects[item.request.key] - item.samples
        self.was_isolated = self.scheduler.is_isolated
        self.others = [
            request
            for request in self.scheduler.running
            if request.key not in suspects and request.num_launched == 0 and request.num_computed < request.num_known
        ]

    def check_plan(self, scheduled: list[ScheduledRequest]) -> None:
        limits = self.scheduler.limits
        assert len({item.request for item in scheduled}) == len(scheduled) <= limits.max_running
        prompts = [item for item in scheduled if item.num_tokens > 1]
        num_prompt_tokens = sum(item.num_tokens for item in prompts)
        assert num_prompt_tokens <= limits.step_tokens or (not limits.chunked_prefill and len(prompts) == 1)
        for request in self.scheduler.running:
            is_complete = request.num_output + request.num_in_flight >= request.max_new_tokens
            assert is_complete or request.num_computed <= request.num_known

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            waiting = self.scheduler.waiting
            assert self.scheduler.num_waiting_tokens == sum(len(request.token_ids) for request in waiting)
            assert [request.order for request in waiting] == sorted(request.order for request in waiting)
            salts: dict[int, str] = {}
            for request in self.scheduler.running:
                for page in request.page_ids:
                    assert salts.setdefault(page, request.cache_salt) == request.cache_salt

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        num_left = sum(len(prompt) + request.max_new_tokens for request, prompt in self.all)
        for _ in range(4 * num_left + 4):
            self.step()
        assert self.scheduler.is_idle and not self.launched
        self.scheduler.check()
        assert self.cache.num_available == self.cache.num_pages
        for request, prompt_ids in self.all:
            alone = generate_alone(prompt_ids, request.max_new_tokens, STOP_IDS)
            output = request.token_ids[len(prompt_ids) :]
            assert output == alone[: len(output)]
            if request.finish_reason in (FinishReason.EOS, FinishReason.LENGTH):
                assert output == alone
                assert (request.finish_reason is FinishReason.EOS) == (output[-1] in STOP_IDS)
            else:
                assert request.finish_reason in (FinishReason.ABORTED, FinishReason.DEADLINE, FinishReason.ERROR)


SchedulerMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=25, deadline=None)
TestScheduler = SchedulerMachine.TestCase

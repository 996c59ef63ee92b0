"""Which tokens the next step computes, within a budget of prompt tokens and the free pages: callers have fair shares,
and of each the first come are the first served.

There is no prefill or decode phase: every running request's computed tokens catch up with its known ones. A plan names
requests and counts, never a token's value, so the next step can be planned while the last one still runs on the device.
Owns the order of requests, their rows of device state, preemption and ends. Imports no torch, reads no clock.
"""

from bisect import insort
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from lorikeet.proto.learning import Pair
from lorikeet.proto.params import MAX_DRAFT_TOKENS
from lorikeet.proto.shares import MAX_UNSTARTED_TOKENS
from lorikeet.shard.requests.request import FinishReason, Request, ScheduledRequest, load_of
from lorikeet.shard.scheduler.adapter_slots import AdapterSlots, NoAdapters
from lorikeet.shard.scheduler.budget import (
    CAPPED_STEPS,
    AdapterPrefillCaps,
    Budget,
    Callers,
    Limits,
    OomBackoff,
    PromptChunks,
    PromptShares,
    backlog,
)
from lorikeet.shard.scheduler.decoding import DecodeStep, DecodingRequests, may_decode
from lorikeet.shard.scheduler.draft_rows import NO_SOURCES
from lorikeet.shard.scheduler.kv_cache import Admission, KvCache
from lorikeet.shard.scheduler.proposer import Proposer
from lorikeet.shard.speculation.costs import NO_LOAD, Load
from lorikeet.shard.speculation.drafter import NO_ROWS, DraftSettings, RowOffers
from lorikeet.shard.speculation.medusa import pair_of


class StepPlan(NamedTuple):
    """What the next step computes."""

    decode: DecodeStep | None
    """The newest token of each request that only decodes."""
    scheduled: list[ScheduledRequest]
    """The tokens of all other requests."""
    load: Load
    """What the step computes, its drafts included."""

    @property
    def num_requests(self) -> int:
        return len(self.scheduled) + (0 if self.decode is None else len(self.decode.members))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of requests that are more than one token behind."""
        return sum(item.end - item.start for item in self.scheduled if item.end - item.start > 1)

    def items(self) -> list[ScheduledRequest]:
        """All requests one by one."""
        decode = self.decode
        return self.scheduled if decode is None else [*map(decode.item, range(len(decode.members))), *self.scheduled]


class Scheduler:
    """The running and the waiting requests of one shard."""

    def __init__(
        self,
        cache: KvCache,
        limits: Limits,
        adapters: AdapterSlots | None = None,
        drafts: DraftSettings | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.adapters = NoAdapters() if adapters is None else adapters
        drafts = drafts or DraftSettings(max_batch_size=0)
        self.proposer = Proposer(cache, drafts)
        self.learned_heads: dict[Pair, str] = {}
        """Digest of the adopted heads of each pair that has some."""
        self.callers = Callers(limits.max_running, limits.short_room)
        self.requests: dict[tuple[int, int], Request] = {}  # all that have not ended
        self.running: list[Request] = []  # in order of admission
        self.waiting: list[Request] = []  # in order of arrival
        self.admitted: list[Request] = []  # got a row since the device state was last updated
        self.freed_rows: list[int] = []  # lost their request since then
        self.num_waiting_tokens = 0
        self.num_preempted = 0
        self._rows = list(reversed(range(limits.max_running)))
        self._ending: set[Request] = set()  # ended, but a launched step still writes their pages
        self._drafted: dict[Request, ScheduledRequest] = {}
        """Launched, with drafts that the device made: how many it accepts is not known."""
        self.num_arrived = 0
        """Requests that were added so far."""
        self._num_admitted = 0
        self._capped_adapters_skipped = False
        self.is_isolated = False
        """Whether the newest step computes a single request because that may have crashed a shard."""
        self.oom_backoff = OomBackoff(limits.step_tokens, limits.max_running, limits.chunked_prefill)
        self.decoding = DecodingRequests(limits.max_running, cache, drafts)
        self._suspects: list[Request] = []
        """Requests that may have crashed a shard, in order of arrival."""
        self._num_by_adapter: Counter[str] = Counter()
        """Requests that have not ended, by the digest of their adapter."""
        self.prompt_chunks = PromptChunks(limits)
        self._adapter_prefill_caps = AdapterPrefillCaps(limits, self.prompt_chunks)
        self._next_deadline = inf
        self._without_pages: Request | None = None
        """Of a caller of which nothing runs: in the last plan it found too few pages."""

    @property
    def is_idle(self) -> bool:
        """No request is left, not even one that has ended but is still being computed."""
        return not self.requests and not self._ending

    def add(self, request: Request) -> None:
        """Queue a request. Its key must be new."""
        self.num_arrived += 1
        request.order = self.num_arrived
        self.requests[request.key] = request
        self._num_by_adapter[request.adapter_digest] += 1
        if request.isolation_steps:
            self._suspects.append(request)
        self._enqueue(request)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline has passed."""
        if now < self._next_deadline:
            return []
        late = [r for r in self.requests.values() if r.deadline is not None and r.deadline <= now]
        for request in late:
            self.finish(request, FinishReason.DEADLINE)
        self._next_deadline = min((r.deadline for r in self.requests.values() if r.deadline is not None), default=inf)
        return late

    def plan(self) -> StepPlan:
        """Choose what the next step computes, and count it as launched."""
        self.take_back()
        decode = self._launch_decoding()
        scheduled = self.schedule(decode)
        if decode is not None and decode.is_dissolved:
            decode = None
        decoding = NO_LOAD if decode is None else decode.load
        return StepPlan(decode, scheduled, load_of(scheduled) + decoding if scheduled else decoding)

    def take_back(self) -> None:
        """Let the newest requests of callers that run more than their share wait again, and those of the caller with
        the most for one that found too few pages, if nothing of its caller runs.
        """
        self.callers.plan()
        if above := self.callers.excess():
            for request in self.running[::-1]:
                if above[request.caller] > 0 and self._take_back(request):
                    above[request.caller] -= 1
        if (waiting := self._without_pages) is not None:
            self._without_pages = None
            if waiting.row < 0 and not waiting.finish_reason:
                self._take_back_for(waiting)

    def _take_back_for(self, waiting: Request) -> None:
        num_needed = self.cache.num_needed(len(waiting.token_ids))
        for request in self.running[::-1]:
            largest = self.callers.largest()
            if largest is None or num_needed + len(self.running) <= self.cache.num_available:
                return
            if request.caller == largest:
                self._take_back(request)

    def _take_back(self, request: Request) -> bool:
        """Let a running request wait again. False where a launched step writes its pages, or where it runs alone."""
        if request.isolation_steps:
            return False
        if request.is_decoding:
            self._leave_decoding(request)
        if request.num_launched or request.is_draft:
            return False
        self._preempt(request)
        return True

    def _launch_decoding(self) -> DecodeStep | None:
        """The next step's part of the requests that only decode. If a request must run alone, or pages are short so
        that requests may be preempted, no request is one that only decodes: `schedule` chooses among all of them.
        """
        if not len(self.decoding):
            return None
        self._leave_unready()
        num_missing = self.decoding.num_missing_pages()
        for request in self._others():
            num_tokens = request.num_known + self._num_uncertain(request)
            num_missing += max(0, self.cache.num_needed(num_tokens) - len(request.page_ids))
        if num_missing > self.cache.num_available or self.is_isolated or self._open_suspects():
            for request in self.decoding.members.requests:
                self._leave_decoding(request)
            return None
        return self.decoding.launch()

    def _leave_unready(self) -> None:
        """Plan requests like others of which it has yet to be decided whether a network drafts, or whose draft model
        lags behind.
        """
        is_full = len(self.running) > self.proposer.drafters.settings.max_batch_size
        members = self.decoding.members
        if is_full or self.oom_backoff.is_active or not (len(members.with_heads) or len(members.with_draft_model)):
            return
        for index in self.proposer.unready(self.decoding.networks()).tolist():
            self._leave_decoding(members.requests[index])

    def _leave_decoding(self, request: Request) -> None:
        """Plan and commit the request like others from now on, with its parts of launched steps."""
        items = self.decoding.launched_items(request)
        self.decoding.leave(request)
        for item in items if request.drafts_on_device else ():
            earlier = self._drafted.pop(request, None)
            if earlier is not None and earlier is not item:
                earlier.next = item
            if item.draft_ids:
                self._drafted[request] = item

    def _offers_of_decoding(self, decode: DecodeStep, scheduled: list[ScheduledRequest]) -> RowOffers:
        """The drafts that requests that only decode may have. If pages are short, these are planned like others, so
        that the earlier ones get the pages.
        """
        if len(self.running) > self.proposer.drafters.settings.max_batch_size:
            return NO_ROWS
        offers = self.decoding.offers(decode)
        most_widths = offers.most_widths
        if not most_widths.any():
            return NO_ROWS if offers.networks is None else offers
        num_missing = self.decoding.num_missing_for(decode, most_widths)
        for item in scheduled:
            num_tokens = item.end_of_pages + MAX_DRAFT_TOKENS
            num_missing += max(0, self.cache.num_needed(num_tokens) - len(item.request.page_ids))
        if num_missing <= self.cache.num_available:
            return offers
        for index, request in enumerate(decode.members.requests):
            if request.is_decoding:
                self._leave_decoding(request)
            scheduled.append(decode.item(index))
        decode.is_dissolved = True
        self.decoding.forget(decode)
        scheduled.sort(key=lambda item: item.request.admission)
        return NO_ROWS

    def decode(self, request: Request) -> None:
        """After a commit: count the request among those that only decode, if it is one."""
        is_short = self.cache.num_available < len(self.running)  # requests may soon be preempted
        drafters, num_running = self.proposer.drafters, len(self.running)
        if not may_decode(request) or is_short or not drafters.may_decode(request, num_running):
            return
        is_pausing = drafters.is_pausing(request, num_running)
        if is_pausing:
            drafters.pause(request)
        drafted = self._drafted.get(request)
        num_drafts = 0 if drafted is None else len(drafted.draft_ids)
        sources = NO_SOURCES if is_pausing else self.proposer.row_sources(request)
        self.decoding.join(request, num_drafts, sources, is_pausing)
        if drafted is not None and any(drafted is item for item in self.decoding.launched_items(request)):
            del self._drafted[request]

    def resume_drafts(self) -> None:
        """Once few enough requests run: plan those with drafts of the host like others again."""
        settings, num_running = self.proposer.drafters.settings, len(self.running)
        if num_running > settings.max_batch_size or not len(self.decoding):
            return
        members = self.decoding.members
        leaving = members.pausing.tolist()
        if num_running < settings.fewest_rows:
            leaving += members.host_drafting.tolist()
        for index in leaving:
            self._leave_decoding(members.requests[index])

    def _others(self) -> list[Request]:
        """Running requests that are not in `decoding`."""
        if len(self.decoding) == len(self.running):
            return []
        return [request for request in self.running if not request.is_decoding]

    def _open_suspects(self) -> list[Request]:
        """Requests that still have isolation steps to come, in order of arrival."""
        if self._suspects:
            self._suspects = [each for each in self._suspects if each.isolation_steps and not each.finish_reason]
        return self._suspects

    def schedule(self, decode: DecodeStep | None = None) -> list[ScheduledRequest]:
        """Launch the next step's requests, except those that only decode, which have been launched as `decode`.

        A request that may have crashed a shard is computed alone. Its steps and those of all other requests take turns
        as long as both have something to compute.
        """
        suspects = self._open_suspects()
        turns = [None, *suspects] if self.is_isolated else [*suspects, None]
        for suspect in turns:
            if scheduled := self._fill_step(decode, suspect):
                self.is_isolated = suspect is not None
                return scheduled
        self.is_isolated = False
        return []

    def _fill_step(self, decode: DecodeStep | None, suspect: Request | None) -> list[ScheduledRequest]:
        """Launch as many requests as the step's budget and the pages allow: `suspect` alone, or all but suspects.

        Prompts of an adapter with more requests than another one are capped and wait for every second step. Where the
        other prompts would fill CAPPED_STEPS steps, every second step takes all prompts in order.
        """
        scheduled: list[ScheduledRequest] = []
        caps = self._adapter_prefill_caps.of(self._num_by_adapter) if suspect is None else {}
        if len(self.decoding) == len(self.running) and not (self.waiting and self._has_row):
            self._capped_adapters_skipped = False
            budget = Budget(self.limits, caps)
        else:
            budget = self._launch_within(scheduled, caps, suspect)
        if not self.oom_backoff.is_active:
            self._add_drafts(scheduled, decode, budget)
        return scheduled

    def _launch_within(
        self, scheduled: list[ScheduledRequest], caps: dict[str, int], suspect: Request | None
    ) -> Budget:
        """Launch the requests of a step within its budget. Returns what is left of that."""
        shares = self._prompt_shares() if suspect is None else None
        step_tokens = min(self.oom_backoff.step_tokens, self._choose_step_tokens(shares))
        if self._capped_adapters_skipped and self._num_prompt_tokens_without(caps) >= CAPPED_STEPS * step_tokens:
            caps = {}  # nothing would be left for the capped adapters
        budget = Budget(self.limits, caps, step_tokens, shares)
        is_complete = self._launch_fitting(scheduled, budget, suspect)
        has_prompts = budget.num_left < step_tokens
        self._capped_adapters_skipped = bool(caps) and has_prompts and not self._capped_adapters_skipped
        if caps and is_complete and not self._capped_adapters_skipped:
            budget.pass_for_capped = True
            self._launch_fitting(scheduled, budget, suspect)
        return budget

    def _add_drafts(self, scheduled: list[ScheduledRequest], decode: DecodeStep | None, budget: Budget) -> None:
        """Add drafts to a planned step."""
        offers = NO_ROWS
        if decode is not None and decode.members.has_drafting:
            offers = self._offers_of_decoding(decode, scheduled)
        if not (scheduled or len(offers.widths)):
            return
        decoding = NO_LOAD if decode is None or decode.is_dissolved else decode.load
        drafts = self.proposer.propose(scheduled, len(self.running), budget, decoding, offers)
        if decode is not None and len(offers.widths):
            self.decoding.add_drafts(decode, drafts)
        drafted = (item for item in scheduled if item.is_on_device)
        self._drafted.update((item.request, item) for item in drafted)

    def _prompt_shares(self) -> PromptShares | None:
        """Prompts that could be computed now, where callers share a step."""
        if not (self.callers.are_several and self.limits.chunked_prefill):
            return None
        enough = max(self.limits.step_tokens, MAX_UNSTARTED_TOKENS)
        return self.callers.prompt_shares(self._others(), self.is_parked, enough)

    def _choose_step_tokens(self, shares: PromptShares | None) -> int:
        behind = [request.num_known - request.num_computed for request in self._others()]
        num_waiting = self.num_waiting_tokens + sum(num for num in behind if num > 1)
        if shares is not None and len(tokens := shares.by_caller()) > 1:
            num_waiting = backlog(tokens)
        return self.prompt_chunks.choose(num_waiting, behind.count(1) + len(self.decoding), self.callers.are_unequal)

    def _num_prompt_tokens_without(self, digests: Container[str]) -> int:
        """Prompt tokens that could be computed now, without those of these adapters."""
        able = [*self._others(), *(request for request in self.waiting if not self.is_parked(request))]
        behind = (r.num_known - r.num_computed for r in able if r.adapter_digest not in digests)
        return sum(num for num in behind if num > 1)

    def _launch_fitting(self, scheduled: list[ScheduledRequest], budget: Budget, suspect: Request | None) -> bool:
        """Append what the budget grants to running requests, then to waiting ones. False if pages ran out."""
        num_preempted = self.num_preempted
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if request.is_decoding:
                index += 1
                continue
            may_compute = _may_compute(request, suspect) and not self._must_wait(request)
            num_tokens = budget.grant(request) if may_compute else 0
            if num_tokens:
                num_covered = len(request.page_ids) * self.cache.page_size
                num_wanted = request.num_computed + num_tokens + self._num_uncertain(request)
                if num_wanted > num_covered and not self._make_room(request, num_wanted):
                    return False
                scheduled.append(self._launch(request, num_tokens, budget))
            index += 1
        if self.num_preempted == num_preempted:
            self._admit(scheduled, budget, suspect)
        return True

    def commit(self, item: ScheduledRequest, token_ids: Sequence[int] = (), head_ids: Sequence[int] = ()) -> int:
        """Record the result of a launched step for one request: its KV, and the target's tokens up to the end of the
        request. head_ids: `item.num_heads` draft tokens of heads after each token. Returns how many tokens were taken,
        -1 if the request had ended before.
        """
        request = item.request
        self._begin_commit(item)
        following = item.next
        if request.finish_reason:
            self._release_unless_launched(request)
            return -1
        taken, reason = self._truncate(request, token_ids)
        request.is_draft = request.is_draft and not item.draft_ids
        if item.match_length is not None:
            request.match_length = item.match_length
        if taken:
            request.num_in_flight -= 1
            request.token_ids += taken
            request.is_fresh = False
        num_accepted = max(0, len(taken) - 1)
        if following is not None:
            following.settle(num_accepted)
        request.num_computed += num_accepted
        request.num_committed = item.end + num_accepted
        self.proposer.committed(item, taken, head_ids, bool(reason))
        if request.num_committed >= (request.num_published + 1) * self.cache.page_size:
            self.cache.publish(request)
        if item.draft_ids or item.is_on_device:
            # frees pages of rejected drafts; their KV in the last page is overwritten
            num_needed = 0 if following is None else following.end_of_pages
            self.cache.shrink(request, max(num_needed, len(request.token_ids)))
        if reason:
            self.finish(request, reason)
        return len(taken)

    @staticmethod
    def _truncate(request: Request, token_ids: Sequence[int]) -> tuple[list[int], FinishReason]:
        """Takes the tokens into the request's constraint, up to the one that ends the request, or that may end it once
        a thread has taken it in. Returns them, and why the request ends.
        """
        taken: list[int] = []
        for token_id in token_ids:
            taken.append(token_id)
            if token_id in request.stop_ids or request.constraint.commit(token_id):
                return taken, FinishReason.EOS
            if request.num_output + len(taken) >= request.max_new_tokens:  # or the grammar is complete
                return taken, FinishReason.LENGTH if request.constraint.is_ready else FinishReason.NONE
            if not request.constraint.is_ready:
                break
        return taken, FinishReason.NONE

    def discard(self, item: ScheduledRequest) -> bool:
        """A launched step failed: end this request of it in error. False if it had ended before."""
        request = item.request
        self._begin_commit(item)
        if request.finish_reason:
            self._release_unless_launched(request)
            return False
        self.finish(request, FinishReason.ERROR)
        return True

    def requeue(self, item: ScheduledRequest) -> None:
        """A launched step failed: compute this request of it again. No later step of the request is launched."""
        request = item.request
        self._begin_commit(item)
        if request.finish_reason:
            self._release_unless_launched(request)
        elif request.row >= 0:
            request.num_in_flight -= item.samples
            self._preempt(request)

    def fail_adapter(self, digest: str) -> list[Request]:
        """End the requests that wait for an adapter that failed to load."""
        lost = [request for request in self.waiting if digest in request.digests]
        for request in lost:
            self.finish(request, FinishReason.ERROR)
        return lost

    def fail_unplaceable(self) -> list[tuple[Request, str]]:
        """End the requests whose adapters can never be in slots together, given their sizes. Returns them and why."""
        found = [(request, self.adapters.reject_reason(request.digests)) for request in self.waiting]
        lost = [(request, reason) for request, reason in found if reason]
        for request, _ in lost:
            self.finish(request, FinishReason.ERROR)
        return lost

    @property
    def num_parked(self) -> int:
        """Waiting requests that cannot run yet."""
        return sum(1 for _ in self.parked())

    def parked(self) -> Iterator[Request]:
        """Waiting requests that cannot run yet."""
        return filter(self.is_parked, self.waiting)

    def is_parked(self, request: Request) -> bool:
        """Whether its adapter is not in a slot, or its grammar is being compiled."""
        return not (request.constraint.is_ready and all(map(self.adapters.is_resident, request.digests)))

    def swap_heads(self, pair: Pair, digest: str) -> None:
        """Let these learned heads draft for a pair's requests, running ones too; "" for those that requests come with.
        Call this between steps.
        """
        self.learned_heads[pair] = digest
        if not digest:
            del self.learned_heads[pair]
        for request in self.running:
            if pair_of(request) == pair and not request.num_launched:
                self._swap_heads(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request now; its pages and row are released as soon as no launched step writes them."""
        if request.is_decoding:
            self.decoding.leave(request)
        request.finish_reason = reason
        self._num_by_adapter[request.adapter_digest] -= 1
        if not self._num_by_adapter[request.adapter_digest]:
            del self._num_by_adapter[request.adapter_digest]
        self.proposer.finished(request, has_failed=reason is FinishReason.ERROR)
        del self.requests[request.key]
        if request.row < 0:
            self._stop_waiting(request)
            self.callers.stops_waiting(request)
        else:
            self.running.remove(request)
            self.callers.stops_running(request)
            self._ending.add(request)
            self._release_unless_launched(request)
        if not self.requests:
            self.callers.forget_idle()

    def check(self) -> None:
        """Prove that pages, rows, slots and requests of callers are accounted for. Raises RuntimeError."""
        owners = [*self.running, *self._ending]
        self.cache.check(owners)
        if sorted([*self._rows, *(request.row for request in owners)]) != list(range(self.limits.max_running)):
            raise RuntimeError("rows of device state leaked")
        sums = [request.adapter_digest for request in owners if request.composition is not None]
        self.adapters.check((digest for request in owners for digest in request.digests), sums)
        self.callers.check(self.running, self.waiting)

    def _launch(self, request: Request, num_tokens: int, budget: Budget) -> ScheduledRequest:
        if num_tokens > 1:
            budget.spend(request, num_tokens)
        start = request.num_computed
        end = request.num_computed = start + num_tokens
        samples = end == request.num_known
        request.isolation_steps = max(0, request.isolation_steps - samples)
        request.num_in_flight += samples
        request.num_launched += 1
        item = ScheduledRequest(request, start, end, samples, num_uncertain=self._num_uncertain(request))
        if item.num_uncertain:
            self._drafted.pop(request).next = item
        return item

    def _num_uncertain(self, request: Request) -> int:
        """Draft tokens that the newest launched step of the request may accept."""
        drafted = self._drafted.get(request)
        return 0 if drafted is None else len(drafted.draft_ids)

    def _begin_commit(self, item: ScheduledRequest) -> None:
        if item.request.is_decoding:
            self._leave_decoding(item.request)
        item.request.num_launched -= 1
        if self._drafted.get(item.request) is item:
            del self._drafted[item.request]

    @property
    def awaits_commit(self) -> bool:
        """Whether a running request cannot be in the next step before the launched ones are committed. If the next step
        left it out, requests would split into halves that take turns, and twice as many steps would read the weights.
        """
        is_page_due = self._without_pages is not None and self.callers.largest() is not None
        if is_page_due or self.callers.excess() or self.decoding.awaits_commit or self._decoding_must_wait:
            return True
        return any(request.num_launched and self._must_wait(request) for request in self._others())

    @property
    def _decoding_must_wait(self) -> bool:
        """As `_must_wait`, of any request that only decodes and whose drafts the host makes."""
        if not (len(self.decoding) and len(self.decoding.members.host_drafting)):
            return False
        if self.decoding.host_drafts_in_flight:
            return True
        settings = self.proposer.drafters.settings
        if len(self.running) > settings.max_batch_size:
            return False
        return self.proposer.may_draft_rows(self.decoding.host_offers())

    @property
    def _has_row(self) -> bool:
        return bool(self._rows) and len(self.running) < self.oom_backoff.max_running

    def _must_wait(self, request: Request) -> bool:
        """Whether the number of the next tokens, or the token that the next draft depends on, is unknown until the next
        commit.
        """
        if request.is_draft or not request.constraint.is_ready:
            return True
        if not request.num_in_flight:
            return False
        if request.drafts_on_device:
            return request.num_launched > 1  # the device adds what one step accepts, not two
        return request.constraint.is_constrained or self.proposer.may_draft(request, len(self.running))

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give a running request pages for `num_tokens` tokens, if need be by preempting the latest requests. False if
        it was preempted itself, or if the latest request or drafts are still being computed: the next commit frees
        pages, so the plan ends here.
        """
        while not self.cache.grow(request, num_tokens):
            latest = self.running[-1]
            if latest.is_decoding:
                self._leave_decoding(latest)
            if latest.num_launched or any(other.is_draft for other in self.running):
                return False
            self._preempt(latest)
            if latest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preempted += 1
        self.running.remove(request)
        self.callers.stops_running(request)
        self._release(request)
        self._enqueue(request)

    def _admit(self, scheduled: list[ScheduledRequest], budget: Budget, suspect: Request | None) -> None:
        """Let waiting requests run, in the order of their callers' turns, and of each in order of arrival. One that
        waits for its grammar, its adapter, the pass for capped adapters or a page that another request is computing is
        left out, and later ones may run before it. One that waits for free pages ends the pass, so that no later one
        takes them.
        """
        if not self._has_row or budget.num_left <= 0:
            return
        for request in self.callers.in_turn():
            if not self._has_row or budget.num_left <= 0:
                return
            may_run = request.constraint.is_ready and _may_compute(request, suspect)
            if budget.is_spent(request) or not may_run or not self._take_slots(request):
                continue
            admission = self.cache.admit(request, num_spare=len(self.running))
            if admission is not Admission.ADMITTED:
                self._release_slots(request)
            if admission is Admission.FULL:
                self._without_pages = None if self.callers.has_running(request.caller) else request
                return
            if admission is Admission.AWAITS:
                continue
            self._stop_waiting(request)
            self.callers.runs(request)
            if request.num_cached is None:
                request.num_cached = max(0, min(request.num_computed, request.num_prompt) - request.num_virtual)
            request.drafts_on_device = self.proposer.drafters.draft_on_device(request)
            request.row = self._rows.pop()
            self._num_admitted += 1
            request.admission = self._num_admitted
            self.running.append(request)
            self.admitted.append(request)
            num_tokens = budget.grant(request)
            if num_tokens:
                scheduled.append(self._launch(request, num_tokens, budget))

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda other: other.order)
        self.num_waiting_tokens += len(request.token_ids)
        self.callers.waits(request)

    def _stop_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self.num_waiting_tokens -= len(request.token_ids)

    def _release_unless_launched(self, request: Request) -> None:
        if not request.num_launched:
            self._ending.remove(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        self.cache.release(request)
        self._release_slots(request)
        self._rows.append(request.row)
        self.freed_rows.append(request.row)
        request.row = -1
        request.is_draft = False
        request.is_fresh = True
        self.proposer.release(request)

    def _take_slots(self, request: Request) -> bool:
        """Acquire all slots that the request needs, or none and return False."""
        adapters = self.adapters
        if pair_of(request) is not None:
            request.heads_digest = self._wanted_heads(request)
        slots: dict[str, int] = {}
        for digest in request.digests:
            slot = adapters.acquire(digest)
            if slot is None:
                for taken in slots:
                    adapters.release(taken)
                for other in request.digests:  # all are loaded at once
                    adapters.prefetch(other)
                return False
            slots[digest] = slot
        if request.composition is None:
            request.slot = slots.get(request.adapter_digest, -1)
        else:
            request.slot = adapters.compose(request.adapter_digest, request.composition)
        self._set_heads(request, slots)
        return True

    def _release_slots(self, request: Request) -> None:
        """Release all slots of the request."""
        if request.composition is not None:
            self.adapters.release_sum(request.adapter_digest)
        for digest in request.digests:
            self.adapters.release(digest)
        request.slot = request.heads_slot = -1
        request.num_heads = 0
        if pair_of(request) is not None:
            request.heads_digest = request.given_heads_digest

    def _swap_heads(self, request: Request) -> None:
        """Let the heads draft that the request should have now, if they have a slot."""
        adapters, before, wanted = self.adapters, request.digests, self._wanted_heads(request)
        if wanted == request.heads_digest:
            return
        if wanted and wanted not in before and adapters.acquire(wanted) is None:
            return
        request.heads_digest, request.heads_slot, request.num_heads = wanted, -1, 0
        request.head_ids = ()
        for digest in set(before) - set(request.digests):
            adapters.release(digest)
        self._set_heads(request, {request.adapter_digest: request.slot, wanted: adapters.slot(wanted)})

    def _wanted_heads(self, request: Request) -> str:
        """The learned heads if they have a slot, else those that the request came with: it does not wait for a slot."""
        pair = pair_of(request)
        learned = "" if pair is None else self.learned_heads.get(pair, "")
        return learned if learned and self.adapters.settle(learned) else request.given_heads_digest

    def _set_heads(self, request: Request, slots: Mapping[str, int]) -> None:
        own_heads = request.adapter_digest if request.composition is None else ""
        heads_digest = request.heads_digest or own_heads
        if heads_digest and request.speculation.takes_heads:
            request.heads_slot, request.num_heads = slots[heads_digest], self.adapters.num_heads(heads_digest)


def _may_compute(request: Request, suspect: Request | None) -> bool:
    """Whether the step is one for this request: a suspect has steps of its own, the others' steps have no suspect."""
    return request.isolation_steps == 0 if suspect is None else request is suspect

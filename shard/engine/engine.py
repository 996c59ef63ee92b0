"""The step loop: schedule → forward → sample → commit, as long as there is something to compute; else it sleeps.

One thread owns everything here. It hears of the world through the inbox and tells it through the outbox.
"""

import time
from collections import deque
from dataclasses import dataclass

import structlog
import torch

from lorikeet.shard.batch.network import Network, RankDesync
from lorikeet.shard.batch.transfer import HostCopy, to_device
from lorikeet.shard.engine.drafter import Drafter
from lorikeet.shard.engine.durations import Durations
from lorikeet.shard.engine.gaps import Gaps
from lorikeet.shard.engine.intake import Intake
from lorikeet.shard.engine.step import (
    Layout,
    Step,
    agreed,
    error_output,
    fill_inputs,
    score_output,
    scored_span,
    token_output,
)
from lorikeet.shard.engine.stopwatch import Phase, Stopwatch
from lorikeet.shard.grpc.inbox import Inbox
from lorikeet.shard.grpc.outbox import AdapterEvent, Outbox, Output, Status
from lorikeet.shard.sampling import Sampled, Sampler
from lorikeet.shard.sampling.drafting import DraftDraws
from lorikeet.shard.sampling.highest import arg_max
from lorikeet.shard.scheduler.adapter_slots import Residency
from lorikeet.shard.scheduler.request import FinishReason, Method, Request, Rule, Speculation
from lorikeet.shard.scheduler.scheduled_request import ScheduledRequest
from lorikeet.shard.scheduler.scheduler import Scheduler

log = structlog.get_logger()

BAD_LOGITS = "the model gave no finite logits for this request"
WARM_UP_KEY = (0, 0)
PARKED_WAIT_S = 0.05
"""How long the loop sleeps at once while all requests wait for adapters; deadlines are looked at as often."""
STEP_TIME_CHANGE_S, NEWS = 0.004, 0.2
"""A step is worth a word to the routers if it should differ from the last by so much, in seconds and as a part."""
COPY_WAIT_S = 0.001
"""The same while an adapter is being copied into its slot."""
LASTING = ("illegal", "misaligned", "unspecified launch failure", "assert", "hardware stack")
"""What a launch of Triton's says where a kernel before it has broken the device; other errors are its own."""
ACK_TIMEOUT_S = 0.1
"""So long the step of a suspect, and the one after it, wait for the routers to be told of them, at most."""


@dataclass(frozen=True)
class Pacing:
    """How the loop runs."""

    commit_lag: int = 0
    """Steps that may be launched before the oldest is committed, beyond the one at hand."""
    max_waiting: int = 64
    """Bounds the credit beyond the running requests."""


class Engine:
    """One model, its scheduler, and the loop that moves both."""

    def __init__(
        self,
        network: Network,
        sampler: Sampler,
        scheduler: Scheduler,
        update: tuple[Inbox, Outbox],
        pacing: Pacing,
        drafter: Drafter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.running_step = (0, 0.0)
        """Number and start of the step at hand, (0, …) between steps. Read by other threads."""
        self.has_served = False
        """Whether a request was completed. Read by other threads."""
        self._network = network
        self._sampler = sampler
        self._drafter = drafter
        self._inbox, self._outbox = update
        self._pacing = pacing
        self._intake = Intake(self._inbox, scheduler, scheduler.limits.max_running + pacing.max_waiting)
        self._launched: deque[Step] = deque()
        self._rows: set[int] = set()  # rows that the sampler knows
        self._outputs: list[Output] = []
        self._num_steps = 0
        self._last = (0, 0)  # milliseconds and tokens of the newest step
        self._durations = Durations()
        self._gaps = Gaps(network.inputs.device)
        self._expected = 0.0  # seconds, as told
        self._committed_at = 0.0
        self._num_preempted_sent = 0
        self._told: set[tuple[int, int]] = set()
        """Requests that the routers believe to be computed."""
        self._was_isolated = False
        """Whether that is a suspect."""
        self._is_clean = True
        self._is_cut = False
        self._adapter_events: dict[str, AdapterEvent] = {}

    def run(self) -> None:
        """Step until stop(). Raises when something is wrong with the shard itself."""
        while not (self._is_cut or (self._intake.is_ending and self.scheduler.is_idle)):
            self.step()
            if self.scheduler.is_idle:
                self._when_idle()
            elif not self.scheduler.running and not self._launched:
                self._gaps.rest()
                self._inbox.wait(COPY_WAIT_S if self._is_copying else PARKED_WAIT_S)

    @torch.inference_mode()
    def step(self) -> None:
        """schedule → forward → sample → commit → outputs."""
        adapters = self.scheduler.adapters
        if adapters is not None:
            adapters.now = time.monotonic()
            adapters.settle()
        self._outputs = self._intake.apply()
        self._adapter_events |= self._intake.refused_adapters
        self._intake.refused_adapters.clear()
        self._process_adapter_events()
        for request in self.scheduler.expire(time.monotonic()):
            self._outputs.append(Output(request.key, finish_reason=FinishReason.DEADLINE))
        shares = self.scheduler.schedule()
        if shares:
            self._begin(shares)
            self._announce_step_time(sum(share.num_tokens for share in shares))
            self._launch(shares)
        may_lag = shares and not self._launched[-1].error and not self.scheduler.is_isolated
        num_open = self._pacing.commit_lag if may_lag else 0
        while len(self._launched) > num_open:
            self._commit(self._launched.popleft())
        self._process_adapter_events()  # what left its slot in this step: there may be no next one for long
        self._publish()

    def stop(self) -> None:
        """Take nothing new and end when the running requests have; called again, end after this step. Any thread."""
        self._is_cut = self._intake.is_ending
        self._intake.is_ending = True
        self._inbox.wake()

    def cut(self) -> None:
        """End after this step. Any thread."""
        self._is_cut = True
        self._inbox.wake()

    def warm_up(self) -> None:
        """Run a request of few tokens from end to end, so that what cannot work fails before anyone is served."""
        request = Request(WARM_UP_KEY, token_ids=[0] * 2, num_prompt=2, max_new_tokens=2)
        if self._drafter is not None:
            request.max_new_tokens, request.speculation = 4, Speculation(Method.DRAFT, 2)
        self.scheduler.add(request)
        while not self.scheduler.is_idle:
            self.step()
        if request.finish_reason is not FinishReason.LENGTH:
            raise RuntimeError(next(output.error for output in self._outputs if output.error))
        self.scheduler.check()
        self.has_served = False

    def _begin(self, shares: list[ScheduledRequest]) -> None:
        """Tell the routers whom the step computes before it does: it may be the last thing that this process does."""
        keys = {share.request.key for share in shares}
        is_isolated, was_isolated = self.scheduler.is_isolated, self._was_isolated
        if keys <= self._told and not (is_isolated or was_isolated):
            return
        self._told, self._was_isolated = keys, is_isolated
        if is_isolated:  # nothing else of a suspect's step is at hand when it begins
            while self._launched:
                self._commit(self._launched.popleft())
        # Nor may a suspect be blamed for the step after its own: both begin once the word is out.
        self._outbox.announce_step(keys, ACK_TIMEOUT_S if is_isolated or was_isolated else 0.0)

    def _announce_step_time(self, num_tokens: int) -> None:
        """Tell the routers where the step that begins will be much longer or shorter than the last: by its end they
        time what they send.
        """
        expected, told = self._durations.expected(num_tokens), self._expected
        if abs(expected - told) > max(STEP_TIME_CHANGE_S, NEWS * told):
            self._expected = expected
            self._outbox.publish([], self._status(), self._intake.acknowledged)
            self._num_preempted_sent = self.scheduler.num_preempted

    def _launch(self, shares: list[ScheduledRequest]) -> None:
        """forward → sample. A failure is that of the step's requests, unless the device itself is broken."""
        self._num_steps += 1
        step = Step(self._num_steps, shares, time.monotonic())
        self.running_step = (step.number, step.started)
        self._launched.append(step)
        self._is_clean = False
        try:
            self._refresh_rows()
            self._compute(step)
        except Exception as error:
            if is_device_broken(error):
                raise
            if is_out_of_memory(error) and self.scheduler.oom_backoff.failed(step.num_tokens, len(shares)):
                log.warning(
                    "step out of memory", step=step.number, num_tokens=step.num_tokens, num_requests=len(shares)
                )
                if self._network.inputs.device.type == "cuda":
                    torch.cuda.empty_cache()  # what is free lies in pieces of the wrong sizes
                step.error, step.is_to_be_repeated = "the device has no memory for the step", True
                return
            log.exception("step failed", step=step.number, num_requests=len(shares))
            step.error = f"the step failed: {type(error).__name__}"

    def _compute(self, step: Step) -> None:
        watch = None
        if any(share.draft_ids for share in step.shares):
            watch = step.watch = Stopwatch(self._network.inputs.device)
        draws = None
        if self._drafter is not None:
            self._gaps.begin()
            draws = self._drafter.draft(step.shares, watch)
        if watch is not None:
            watch.mark(Phase.DRAFT)
        layout = Layout()
        for share in step.shares:
            layout.add(share)
        fill_inputs(self._network.inputs, layout, step.shares, self._sampler)
        self._gaps.begin()
        # [S + M + E, V]
        logits = self._network.forward()
        if watch is not None:
            watch.mark(Phase.VERIFY)
        num_sampled = len(layout.sample_indices)
        num_scored = len(layout.score_indices)
        if num_sampled:
            step.sampled = self._sample(logits[:num_sampled], [share for share in step.shares if share.samples], draws)
        if watch is not None:
            watch.mark(Phase.ACCEPT)
        if layout.heads:
            step.head_ids = HostCopy(arg_max(logits[num_sampled + num_scored :]))
        if layout.target_ids:
            target_ids = to_device(torch.tensor(layout.target_ids, dtype=torch.long), logits.device)
            step.scores = self._sampler.prompt_logprobs(
                logits[num_sampled:][:num_scored], target_ids, layout.num_score_alternatives
            )
        self._gaps.end()

    def _sample(self, logits: torch.Tensor, shares: list[ScheduledRequest], draws: DraftDraws | None) -> Sampled:
        """logits: [S, V], one row per sampled token of each share."""
        rows, positions = [share.request.row for share in shares], [share.end for share in shares]
        if any(share.draft_ids for share in shares):
            return self._sampler.verify(logits, rows, positions, [share.draft_ids for share in shares], draws)
        return self._sampler.sample(logits, rows, positions)

    def _refresh_rows(self) -> None:
        """Bring the device state of rows up to date with the scheduler."""
        freed, admitted = self.scheduler.freed_rows, self.scheduler.admitted
        while freed:
            row = freed.pop()
            if row in self._rows:
                self._rows.remove(row)
                self._sampler.remove(row)
        while admitted:
            request = admitted.pop()
            rejects = request.speculation.verify is Rule.REJECTION
            known = (request.token_ids, request.num_prompt)
            self._sampler.add(request.row, request.sampling, request.logprobs, *known, rejects)
            self._rows.add(request.row)

    def _commit(self, step: Step) -> None:
        """Take in what a step gave, and say it."""
        if step.error:
            for share in step.shares:
                if step.is_to_be_repeated:
                    self.scheduler.requeue(share)
                else:
                    self._fail(share, step.error, retryable=True)
            return
        self.scheduler.oom_backoff.passed()
        sampled = step.sampled.to_host() if step.sampled else None
        scores = step.scores.to_host() if step.scores else None
        seconds = step.seconds()
        head_ids: list[int] = step.head_ids.wait()[0].tolist() if step.head_ids else []
        row = first_score = first_head = 0
        for share in step.shares:
            span = scored_span(share)
            token_ids: list[int] = []
            if share.samples and sampled is not None:
                token_ids = agreed(share, sampled, row)
                if not token_ids:
                    self._fail(share, BAD_LOGITS, retryable=False)
                    row += share.num_sampled
                    first_head += share.num_sampled * share.num_heads
                    first_score += len(span)
                    continue
            num_taken = self.scheduler.commit(share, token_ids)
            if num_taken >= 0 and span and scores is not None:
                self._outputs.append(score_output(share, span, scores, first_score))
            first_score += len(span)
            if num_taken > 0 and sampled is not None:
                self._outputs.append(token_output(share, sampled, row, num_taken, seconds))
                self.has_served = self.has_served or share.request.finish_reason is not FinishReason.NONE
                if share.num_heads:
                    at = first_head + (num_taken - 1) * share.num_heads
                    share.request.head_ids = head_ids[at : at + share.num_heads]
            row += share.num_sampled
            first_head += share.num_sampled * share.num_heads
        now = time.monotonic()
        self._last = (round((now - step.started) * 1000), step.num_tokens)
        elapsed = now - max(step.started, self._committed_at)
        self._durations.observe(step.num_tokens, elapsed)
        proposer = self.scheduler.proposer
        if proposer is not None and proposer.draft_length.is_used:
            proposer.draft_length.observe(step.shares, elapsed, step.draft_seconds())
        self._committed_at = now

    def _fail(self, share: ScheduledRequest, error: str, retryable: bool) -> None:
        if self.scheduler.discard(share):
            output = error_output(share.request, error, retryable)
            output.in_step = True
            self._outputs.append(output)

    def _publish(self) -> None:
        if not self._launched:
            self.running_step = (0, 0.0)
        self._outbox.publish(self._outputs, self._status(), self._intake.acknowledged, self._adapter_events)
        self._adapter_events = {}
        self._num_preempted_sent = self.scheduler.num_preempted

    def _process_adapter_events(self) -> None:
        """Draw the consequences of what happened to adapters: failed ones end the requests that wait for them."""
        adapters = self.scheduler.adapters
        if adapters is None:
            return
        changes = adapters.take_changes()
        for digest in changes.unloaded:
            self.scheduler.cache.forget(digest)
        for digest, (residency, reason) in changes.states.items():
            self._adapter_events[digest] = (residency, reason)
            if residency is Residency.FAILED:
                lost = self.scheduler.fail_adapter(digest)
                self._outputs += [error_output(request, reason, retryable=False) for request in lost]
        if changes.states:
            unplaceable = self.scheduler.fail_unplaceable()
            self._outputs += [error_output(request, reason, retryable=False) for request, reason in unplaceable]

    def _status(self) -> Status:
        scheduler, cache = self.scheduler, self.scheduler.cache
        num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
        num_parked = scheduler.num_parked
        max_running = scheduler.limits.max_running
        num_ahead = min(self._pacing.max_waiting, max(1, max_running // 8))  # so that a request that ends is replaced
        num_free_pages = cache.num_available - num_running  # each running request may need one more soon
        return Status(
            step=self._num_steps,
            credit_requests=0
            if self._intake.is_ending
            else max(0, max_running + num_ahead - num_running - num_waiting + num_parked),
            credit_tokens=max(0, num_free_pages * cache.page_size - scheduler.num_waiting_tokens),
            num_running=num_running,
            num_waiting=num_waiting,
            used_pages=cache.num_owned,
            cached_pages=cache.num_cached,
            num_preempted=scheduler.num_preempted - self._num_preempted_sent,
            step_ms=self._last[0],
            step_tokens=self._last[1],
            expected_ms=round(1000 * self._expected),
            gap_us=round(1e6 * self._gaps.seconds()),
        )

    def _when_idle(self) -> None:
        """Prove that nothing leaked, once, then sleep until something comes."""
        self._gaps.rest()
        if not self._is_clean:
            self.scheduler.check()
            self._is_clean = True
        if not (self._is_cut or self._intake.is_ending):
            self._inbox.wait(COPY_WAIT_S if self._is_copying else None)

    @property
    def _is_copying(self) -> bool:
        return self.scheduler.adapters is not None and self.scheduler.adapters.is_copying


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller step may do what this one could not."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_device_broken(error: Exception) -> bool:
    """Whether nothing computed on the device, or on all ranks together, after this error can be trusted."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.AcceleratorError | RankDesync) or "CUDA error" in str(error):
        return True
    return "Triton Error" in str(error) and any(word in str(error) for word in LASTING)

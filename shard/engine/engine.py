"""The step loop: schedule → forward → sample → commit while there is something to compute; else it sleeps.

One thread owns everything here. Commands arrive through the inbox; outputs leave through the outbox.
"""

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
import torch

from lorikeet.proto.grammars import ALL_EXCLUDED
from lorikeet.proto.params import NO_SPECULATION, Verification
from lorikeet.proto.process import REST_S, return_freed_memory
from lorikeet.shard.batch.inputs import Network, RankDesync
from lorikeet.shard.engine.intake import Intake, StepWatch
from lorikeet.shard.engine.step import (
    HostResults,
    Layout,
    Part,
    Step,
    StepResults,
    decoded_columns,
    drafted_columns,
    error_output,
    fill_inputs,
    until_end,
    verify,
)
from lorikeet.shard.grammar.compiler import GrammarCompiler
from lorikeet.shard.grammar.masks import GrammarMasks, truncate_drafts
from lorikeet.shard.grpc.streams import AdapterEvents, Inbox, Outbox, Output, Status, TokenColumns
from lorikeet.shard.learning.learning import Learning
from lorikeet.shard.requests.request import FinishReason, PooledRows, Request, ScheduledRequest, load_of
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.sampling.drafting import DraftDraws
from lorikeet.shard.scheduler.adapter_slots import RELOADABLE, Residency
from lorikeet.shard.scheduler.decoding import DecodeStep, VerifiedDrafts
from lorikeet.shard.scheduler.scheduler import Scheduler, StepPlan
from lorikeet.shard.speculation.costs import NO_LOAD, StepCosts
from lorikeet.shard.speculation.draft_network import DraftNetwork
from lorikeet.shard.system.timing import IdleTime, Phase, PhaseTimer

log = structlog.get_logger()

BAD_LOGITS = "the model gave no finite logits for this request"
BAD_VALUES = "the model gave no finite values for this request"
WARM_UP_KEY = (0, 0)
PARKED_WAIT_S = 0.05
"""Longest sleep of the loop while all requests wait for adapters or grammars; deadlines are checked as often."""
COPY_WAIT_S = 0.001
"""The same while an adapter is being copied into its slot."""
TRAINING_WAIT_S = 1.0
"""Longest sleep of an idle loop while heads are being trained."""
STEP_TIME_CHANGE_S, STEP_TIME_CHANGE = 0.004, 0.2
"""An expected step time is sent to the routers if it differs from the last one by more than both: seconds, fraction."""
STICKY_ERRORS = ("illegal", "misaligned", "unspecified launch failure", "assert", "hardware stack")
"""Parts of a Triton launch error that mean that an earlier kernel left the device unusable."""
ACK_TIMEOUT_S = 0.1
"""The step of an isolated request, and the one after it, wait this long at most until the routers know of them."""


@dataclass(frozen=True)
class LoopConfig:
    """How the loop runs."""

    commit_lag: int = 0
    """Steps that may be launched before the oldest is committed, apart from the newest."""
    max_waiting: int = 64
    """Bounds the credit beyond the running requests."""


class Engine:
    """One model, its scheduler, and the loop that runs both."""

    def __init__(
        self,
        network: Network,
        sampler: Sampler,
        scheduler: Scheduler,
        channels: tuple[Inbox, Outbox],
        config: LoopConfig,
        drafter: DraftNetwork | None = None,
        grammars: GrammarCompiler | None = None,
        pooling: PooledRows | None = None,
        learning: Learning | None = None,
    ) -> None:
        """`pooling`: what every request ends with, for a model that generates no text."""
        self.scheduler = scheduler
        self.running_step = (0, 0.0)
        """Number and start of the current step, (0, …) between steps. Read by other threads."""
        self.has_served = False
        """Whether a request was completed. Read by other threads."""
        self._network = network
        self._sampler = sampler
        self._drafter = drafter
        self._inbox, self._outbox = channels
        self._config = config
        max_open = scheduler.limits.max_running + config.max_waiting
        max_running = scheduler.limits.max_running
        self._most_open = max_running + min(config.max_waiting, max(1, max_running // 8))
        """Requests that run or wait, so that one that ends is replaced at once."""
        self._watch = StepWatch(self._outbox)
        self.learning = learning
        self._intake = Intake(self._inbox, scheduler, max_open, grammars, self._watch, self.learning)
        self._masks = GrammarMasks(sampler.vocab_size, network.inputs.device)
        self._pooling = pooling
        self._launched: deque[Step] = deque()
        self._rows: set[int] = set()  # rows that the sampler has
        self._outputs: list[Output | TokenColumns] = []
        self._num_steps = 0
        self._last = (0, 0)  # milliseconds and tokens of the newest step
        self._step_costs = StepCosts()
        self._idle = IdleTime(network.inputs.device)
        self._expected = 0.0  # seconds, as last sent
        self._committed_at = 0.0
        self._num_preempted_sent = 0
        self._announced: set[tuple[int, int]] = set()
        """Requests of the step that was announced to the routers last."""
        self._was_isolated = False
        """Whether that step was an isolated request's own."""
        self._is_stalled = False
        """Whether the last step computed nothing: every request waits for an adapter or a grammar."""
        self._is_clean = True
        self._keeps_memory = False
        """Whether steps have freed memory that the process keeps."""
        self._is_cut = False
        self._adapter_events = AdapterEvents()

    def run(self) -> None:
        """Step until stop(). Raises when the shard itself is broken."""
        while not (self._is_cut or (self._intake.is_ending and self.scheduler.is_idle)):
            self.step()
            if self.scheduler.is_idle:
                self._when_idle()
            elif self._is_stalled:
                self._idle.reset()
                self._inbox.wait(COPY_WAIT_S if self.scheduler.adapters.is_copying else PARKED_WAIT_S)

    @torch.inference_mode()
    def step(self) -> None:
        """plan → inputs → forward → verify → commit, of which the last may be that of the step before."""
        self._receive()
        num_launched = len(self._launched)
        plan = self._plan()
        self._is_stalled = plan is None and not num_launched
        if plan:
            self._launched.append(self._launch(plan))
        may_lag = plan and not self._launched[-1].error and not self.scheduler.is_isolated
        self._commit_all_but(self._config.commit_lag if may_lag else 0)
        self._process_adapter_events()  # for adapters that left their slots in this step: the next may be far off
        if self.learning is not None:
            self.learning.update()
        self._publish()

    def stop(self) -> None:
        """Take no new requests and end when the running ones have; called again, end after this step. Any thread."""
        self._is_cut = self._intake.is_ending
        self._intake.is_ending = True
        self._inbox.wake()

    def cut(self) -> None:
        """End after this step. Any thread."""
        self._is_cut = True
        self._inbox.wake()

    def warm_up(self) -> None:
        """Run a short request from end to end, so that a configuration that cannot work fails at start."""
        self._masks.warm_up()
        drafts = NO_SPECULATION if self._drafter is None else self._drafter.warm_up
        request = Request(WARM_UP_KEY, [0] * 2, num_prompt=2, max_new_tokens=2 + drafts.num_tokens, speculation=drafts)
        if self._pooling is not None:
            request.pooling, request.max_new_tokens = self._pooling, 1
        self.scheduler.add(request)
        while not self.scheduler.is_idle:
            self.step()
        if request.finish_reason is not FinishReason.LENGTH:
            raise RuntimeError(next(each.error for each in self._outputs if isinstance(each, Output) and each.error))
        self.scheduler.check()
        self.has_served = False

    def _receive(self) -> None:
        """Apply the routers' commands, and end the requests whose deadline has passed."""
        self.scheduler.adapters.now = time.monotonic()
        self.scheduler.adapters.poll_copies()
        self._outputs = [*self._intake.apply()]
        self._process_adapter_events()
        for request in self.scheduler.expire(time.monotonic()):
            self._outputs.append(Output(request.key, finish_reason=FinishReason.DEADLINE))

    def _announce(self, plan: StepPlan) -> None:
        """Announce the step's requests before launching it, so that the router can identify a request that crashes the
        shard; and its expected time where that differs from the last step's, because routers time what they send by it.
        """
        is_isolated, must_wait = self.scheduler.is_isolated, self.scheduler.is_isolated or self._was_isolated
        keys = {item.request.key for item in plan.scheduled}
        if plan.decode is not None:
            keys |= plan.decode.members.keys
        if must_wait or not keys <= self._announced:
            self._announced, self._was_isolated = keys, is_isolated
            if is_isolated:  # no other step may run while an isolated request's does
                self._commit_all_but(0)
            # Nor may the step after it be taken for its own: both start once the routers know of them.
            self._outbox.announce_step(keys, ACK_TIMEOUT_S if must_wait else 0.0)
        load = plan.load
        expected = self.scheduler.prompt_chunks.estimate(plan.num_prompt_tokens, load.num_tokens)
        if expected is None:
            expected = self._step_costs.estimate(load.num_tokens, load.num_attended)
        if abs(expected - self._expected) > max(STEP_TIME_CHANGE_S, STEP_TIME_CHANGE * self._expected):
            self._expected = expected
            self._send([])

    def _plan(self) -> StepPlan | None:
        """Which tokens the step computes, announced to the routers. None if there is nothing to compute."""
        self.scheduler.resume_drafts()
        if self.scheduler.awaits_commit:
            self._commit_all_but(0)
        plan = self.scheduler.plan()
        if not plan.load.num_tokens:
            return None
        self._announce(plan)
        if self._watch:
            self._watch.describe(plan, self.scheduler.waiting)
        return plan

    def _launch(self, plan: StepPlan) -> Step:
        """inputs → forward → verify. A failure is that of the step's requests, unless the device itself is broken."""
        self._num_steps += 1
        is_decode_drafted = plan.decode is not None and plan.decode.has_drafts
        has_drafts = is_decode_drafted or any(item.draft_ids for item in plan.scheduled)
        timer = PhaseTimer(self._network.inputs.device if has_drafts else None)
        started = time.monotonic()
        self.running_step = (self._num_steps, started)
        self._is_clean = False
        try:
            layout, draws = self._inputs(plan, timer)
            logits, hidden = self._forward(plan.scheduled, timer)
            results = self._verify(layout, logits, draws, timer)
        except Exception as error:
            return self._failed(Step(self._num_steps, plan, plan.load, started, timer), error)
        if hidden is not None:
            results = replace(results, hidden=hidden)
        return Step(self._num_steps, plan, plan.load, started, timer, layout, results)

    def _inputs(self, plan: StepPlan, timer: PhaseTimer) -> tuple[Layout, DraftDraws | None]:
        """Describe the step to the model. Drafts of a draft model are drawn first; returns how."""
        self._refresh_rows()
        draws = None if self._drafter is None else self._draw(self._drafter, plan, timer)
        timer.mark(Phase.DRAFT)
        truncate_drafts(plan.scheduled)
        layout = Layout.of(plan)
        self._masks.start(plan.scheduled, layout.num_decoding)
        fill_inputs(self._network.inputs, layout, self._sampler, self._masks.is_needed)
        return layout, draws

    def _draw(self, drafter: DraftNetwork, plan: StepPlan, timer: PhaseTimer) -> DraftDraws | None:
        """Fill in the drafts of the draft model. Returns how they were drawn, None without any."""
        decode = plan.decode
        draws, ids_by_row = drafter.draft(plan.scheduled, None if decode is None else decode.passes, timer, self._idle)
        for item in plan.scheduled:
            if item.num_drawn:
                item.draft_ids = ids_by_row[item.request.row]
        if draws is not None and decode is not None:
            decode.take_drawn(ids_by_row)
        return draws

    def _forward(
        self, scheduled: list[ScheduledRequest], timer: PhaseTimer
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns [S + M + E, V] logits: of sampled tokens, scored prompt tokens and heads' drafts; and [S, H] hidden
        states in bfloat16, if heads are learned from a request of the step.
        """
        self._idle.stop()
        if self.learning is not None and self.learning.collects(scheduled):
            logits, hidden = self._network.forward_with_hidden()
        else:
            logits, hidden = self._network.forward(), None
        timer.mark(Phase.VERIFY)
        return logits, hidden

    def _verify(self, layout: Layout, logits: torch.Tensor, draws: DraftDraws | None, timer: PhaseTimer) -> StepResults:
        """Sample the target's tokens, with and without drafts by one rule, and start to copy them to the host."""
        results = verify(layout, logits, self._network.inputs, self._sampler, self._masks, draws)
        timer.mark(Phase.ACCEPT)
        self._idle.start()
        return results

    def _failed(self, step: Step, error: Exception) -> Step:
        """The step with the reason of its failure. Raises it if the device is broken."""
        if is_device_broken(error):
            raise error
        self._masks.wait()
        num_tokens, num_requests = step.load.num_tokens, step.plan.num_requests
        sizes = {"step": step.number, "num_tokens": num_tokens, "num_requests": num_requests}
        if is_out_of_memory(error) and self.scheduler.oom_backoff.on_oom(num_tokens, num_requests):
            log.warning("step_out_of_memory", **sizes)
            if self._network.inputs.device.type == "cuda":
                torch.cuda.empty_cache()  # the free memory is fragmented
            return replace(step, error="the device has no memory for the step", is_retried=True)
        log.error("step_failed", exc_info=error, **sizes)
        return replace(step, error=f"the step failed: {type(error).__name__}")

    def _commit_all_but(self, num_steps: int) -> None:
        """Commit the launched steps except the newest `num_steps`."""
        while len(self._launched) > num_steps:
            self._commit(self._launched.popleft())

    def _commit(self, step: Step) -> None:
        """Record the results of a step, and make outputs of them."""
        if step.error:
            if step.plan.decode is not None:
                self.scheduler.decoding.forget(step.plan.decode)
            for item in step.plan.items():
                if step.is_retried:
                    self.scheduler.requeue(item)
                else:
                    self._fail(item, step.error, retryable=True)
            return
        self.scheduler.oom_backoff.on_success()
        results, seconds, scheduled = step.to_host(), step.timer.seconds(), step.plan.scheduled
        draft_seconds = seconds[Phase.FIRST_DRAFT], seconds[Phase.DRAFT]
        spent = sum(draft_seconds), seconds[Phase.VERIFY], seconds[Phase.ACCEPT]
        draft_length, load = self.scheduler.proposer.draft_length, NO_LOAD
        if draft_length.is_used:  # grammars have shortened drafts since the plan
            load = load_of(scheduled) + (NO_LOAD if step.plan.decode is None else step.plan.decode.load)
        if step.plan.decode is not None:
            self._commit_decoding(step.plan.decode, results, spent)
        for part in step.layout.parts:
            self._commit_part(part, results, spent)
        if self.learning is not None:
            self.learning.append(results.hidden)
        now = time.monotonic()
        self._last = (round((now - step.started) * 1000), step.load.num_tokens)
        elapsed = now - max(step.started, self._committed_at)
        self._step_costs.observe(step.load.num_tokens, step.load.num_attended, elapsed)
        self.scheduler.prompt_chunks.observe(step.plan.num_prompt_tokens, step.load.num_tokens, elapsed)
        if draft_length.is_used:
            draft_length.observe(scheduled, load, elapsed, draft_seconds, step.layout.network_load)
        self._committed_at = now

    def _commit_decoding(self, decode: DecodeStep, results: HostResults, seconds: tuple[float, float, float]) -> None:
        """Commit a step's part of the requests that only decode: as columns where they continue, else one by one."""
        columns, num_tokens, drafting, verified = results.columns, decode.num_tokens, decode.members.drafting, None
        assert columns is not None
        if len(drafting):
            verified = VerifiedDrafts(results.draft_ids[: len(drafting)], results.match_lengths[: len(drafting)])
        token_ids, is_bad = columns.token_ids[:num_tokens], columns.bad[:num_tokens]
        committed = self.scheduler.decoding.commit(decode, token_ids, is_bad, verified, results.head_ids)
        self.scheduler.proposer.committed_rows(decode, committed)
        continues = committed.continues
        do_all = np.count_nonzero(continues) == len(continues)
        for group in decode.members.groups:
            if not (do_all or continues[group.indices].any()):
                continue
            if decode.has_drafts:
                self._outputs.append(drafted_columns(group, decode, columns, committed, seconds))
            else:
                self._outputs.append(decoded_columns(group, columns, None if do_all else continues))
        for index in [] if do_all else np.flatnonzero(~continues).tolist():
            item, first = decode.item(index), int(decode.firsts[index])
            on_device = int(np.searchsorted(drafting, index)) if item.request.drafts_on_device else -1
            sampled, first_heads = range(first, first + item.num_sampled), int(decode.first_heads[index])
            heads = range(first_heads, first_heads + len(sampled) * item.num_heads)
            part = Part(item, sampled, heads=heads, on_device=on_device)
            self._commit_part(part, results, seconds)

    def _commit_part(self, part: Part, results: HostResults, seconds: tuple[float, float, float]) -> None:
        item = part.item
        if item.request.pooling is not None:
            self._commit_pooled(part, results)
            return
        if part.on_device >= 0:
            item.match_length = int(results.match_lengths[part.on_device])
            if item.is_on_device:
                item.draft_ids = until_end(results.draft_ids[part.on_device].tolist())
        token_ids = part.accepted_ids(results.sampled)
        if error := item.request.constraint.error:
            if not item.request.finish_reason and self._intake.match_apart(item.request):
                self.scheduler.requeue(item)
            else:
                self._fail(item, error, retryable=False)
            return
        if item.samples and not token_ids:
            self._fail(item, ALL_EXCLUDED if item.request.sampling.has_masks else BAD_LOGITS, retryable=False)
            return
        head_ids = results.head_ids[part.heads.start : part.heads.stop].tolist()
        num_taken = self.scheduler.commit(item, token_ids, head_ids)
        if num_taken >= 0 and part.scored:
            self._outputs.append(part.score_output(results.scores))
        if not (item.request.constraint.is_ready or item.request.finish_reason):
            self._intake.match(item.request)
        if num_taken > 0:
            self._outputs.append(part.token_output(results.sampled, num_taken, seconds))
            if self.learning is not None:
                self.learning.collect(item, part.sampled.start, token_ids[:num_taken])
            self.has_served = self.has_served or item.request.finish_reason is not FinishReason.NONE
            self.scheduler.decode(item.request)

    def _commit_pooled(self, part: Part, results: HostResults) -> None:
        """To the scheduler, the vector or the scores of a request are its only token."""
        rows = results.pooled[part.pooled.start : part.pooled.stop]
        if not rows.isfinite().all():
            self._fail(part.item, BAD_VALUES, retryable=False)
        elif self.scheduler.commit(part.item, [0] if part.item.samples else []) > 0:
            self._outputs.append(part.pooled_output(results.pooled))
            self.has_served = True

    def _refresh_rows(self) -> None:
        """Update the device state of rows for the requests that left and came."""
        freed, admitted = self.scheduler.freed_rows, self.scheduler.admitted
        while freed:
            row = freed.pop()
            if row in self._rows:
                self._rows.remove(row)
                self._sampler.remove(row)
        while admitted:
            request = admitted.pop()
            if request.pooling is not None:
                continue
            rejects = request.speculation.verify is Verification.REJECTION
            known = (request.token_ids[request.num_virtual :], request.num_prompt - request.num_virtual)
            most_tokens = request.num_prompt + request.max_new_tokens if request.drafts_on_device else 0
            self._sampler.add(request.row, request.sampling, request.logprobs, *known, rejects, most_tokens)
            self._rows.add(request.row)

    def _fail(self, item: ScheduledRequest, error: str, retryable: bool) -> None:
        if self.scheduler.discard(item):
            output = error_output(item.request, error, retryable)
            output.in_step = True
            self._outputs.append(output)

    def _publish(self) -> None:
        if not self._launched:
            self.running_step = (0, 0.0)
        self._send(self._outputs, self._adapter_events)
        self._adapter_events = AdapterEvents()

    def _send(self, outputs: list[Output | TokenColumns], adapters: AdapterEvents | None = None) -> None:
        """Send outputs with the shard's state, and with credit to each stream."""
        status = self._status()
        credits = {}
        if not (status.credit_requests and status.credit_tokens):
            cache = self.scheduler.cache
            credits = self._intake.credits(self._most_open, cache.num_pages * cache.page_size)
        self._outbox.publish(outputs, status, self._intake.acknowledged, adapters, credits)
        self._num_preempted_sent = self.scheduler.num_preempted

    def _process_adapter_events(self) -> None:
        """Apply what happened to adapters: a failed one ends the requests that wait for it."""
        changes = self.scheduler.adapters.take_changes()
        if not (changes.unloaded or changes.states):
            return
        for digest in changes.unloaded:
            self.scheduler.cache.forget(digest)
        self._adapter_events.add(AdapterEvents(dict.fromkeys(changes.unloaded), changes.states))
        for digest, (residency, reason) in changes.states.items():
            if self.learning is not None:
                self.learning.changed(digest, residency, reason)
            if residency is Residency.FAILED:
                lost = self.scheduler.fail_adapter(digest)
                self._outputs += [error_output(request, reason, reason in RELOADABLE) for request in lost]
        if changes.states:
            unplaceable = self.scheduler.fail_unplaceable()
            self._outputs += [error_output(request, reason, retryable=False) for request, reason in unplaceable]

    def _status(self) -> Status:
        scheduler, cache = self.scheduler, self.scheduler.cache
        num_running, num_waiting = len(scheduler.running), len(scheduler.waiting)
        num_free = self._most_open - num_running - num_waiting + scheduler.num_parked
        num_free_pages = cache.num_available - num_running  # each running request may need one more soon
        return Status(
            step=self._num_steps,
            credit_requests=0 if self._intake.is_ending else max(0, num_free),
            credit_tokens=max(0, num_free_pages * cache.page_size - scheduler.num_waiting_tokens),
            num_running=num_running,
            num_waiting=num_waiting,
            used_pages=cache.num_owned,
            cached_pages=cache.num_cached,
            num_preempted=scheduler.num_preempted - self._num_preempted_sent,
            step_ms=self._last[0],
            step_tokens=self._last[1],
            expected_ms=round(1000 * self._expected),
            gap_us=round(1e6 * self._idle.seconds()),
            is_stalled=self._is_stalled,
            learning=None if self.learning is None else self.learning.totals,
        )

    def _when_idle(self) -> None:
        """Prove that nothing leaked, once, then sleep until a command arrives, or until memory can be returned."""
        self._idle.reset()
        if not self._is_clean:
            self.scheduler.check()
            self._is_clean = self._keeps_memory = True
        if not (self._is_cut or self._intake.is_ending):
            is_training = self.learning is not None and self.learning.trainer.state == "training"
            if self._keeps_memory and not (is_training or self.scheduler.adapters.is_copying):
                if not self._inbox.wait(REST_S):
                    return_freed_memory()
                    self._keeps_memory = False
                return
            seconds = TRAINING_WAIT_S if is_training else None
            self._inbox.wait(COPY_WAIT_S if self.scheduler.adapters.is_copying else seconds)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller step may succeed where this one failed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_device_broken(error: Exception) -> bool:
    """Whether no result of the device, or of all ranks together, can be trusted after this error."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.AcceleratorError | RankDesync) or "CUDA error" in str(error):
        return True
    return "Triton Error" in str(error) and any(word in str(error) for word in STICKY_ERRORS)


log = structlog.get_logger()

POLL_S = 0.1
STUCK_EXIT = 3


class Watchdog(threading.Thread):
    """Monitors one engine."""

    def __init__(self, engine: Engine, served_file: str | None, step_timeout_s: float) -> None:
        """`served_file` is created once a request was completed. `step_timeout_s`: 0 never times out."""
        super().__init__(name="watchdog", daemon=True)
        self._engine = engine
        self._served_file = Path(served_file) if served_file else None
        self._step_timeout_s = step_timeout_s

    def run(self) -> None:
        while True:
            self.poll()
            time.sleep(POLL_S)

    def poll(self) -> None:
        """Check once."""
        if self._served_file and self._engine.has_served:
            self._served_file.touch()
            self._served_file = None
        number, started = self._engine.running_step
        if number and 0 < self._step_timeout_s < time.monotonic() - started:
            log.error("step_hung", step=number, timeout_s=self._step_timeout_s)
            os._exit(STUCK_EXIT)

"""Learns Medusa heads while serving: collects rows, has heads trained, adopts those that are better, and reverts them.

Everything here runs between steps, in the step loop's thread. Speculation is lossless, so that heads change speed only.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import structlog
import torch

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.learning import Trained, TrainingJob
from lorikeet.shard.learning.records import HeadsDecision, Record, Records
from lorikeet.shard.learning.rings import Pair, Rings
from lorikeet.shard.learning.trainer import Trainer
from lorikeet.shard.model.medusa.heads import HeadsPool
from lorikeet.shard.requests.request import Source
from lorikeet.shard.requests.scheduled_request import ScheduledRequest
from lorikeet.shard.scheduler.adapter_slots import Residency
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.speculation.medusa import pair_of

log = structlog.get_logger()

MAX_WAITS = 16
"""After each training without a gain the next one waits for twice as many rows, up to this factor of MIN_ROWS."""
MAX_BLOCKS = 2048
"""The newest blocks of a pair that one training reads: so many fit the buffer of a pipe."""
MIN_GAIN = 1.02
"""Tokens per step of new heads over those in use, from which on they are adopted."""
REVERT_STEPS = 256
"""Steps in a row in which acceptance is below that of the heads before, after which these are used again."""
MARGIN = 0.98
"""Acceptance counts as lower below this part of the earlier one: it is a mean of random events."""
FLOOR = 0.02
"""Acceptance that heads need which replaced none."""
MAX_PAIRS = 1024
"""Pairs that are known; those that were not used for longest are dropped."""
MIN_ROWS = 2048
"""Rows of a pair that come between two of its trainings, at least."""
ACCEPTANCE_STEPS = 256
"""Steps over which acceptance is averaged."""
KNOWN_STEPS = 64
"""Steps until acceptance is known."""
MAX_DECISIONS = 20
"""Decisions that are kept of each pair."""


@dataclass
class LearnedPair:
    """What is known of the requests of one tenant with one adapter: their rows, the heads they use, and how well these
    draft.
    """

    pair: Pair
    number: int
    given_digest: str = ""
    """The heads that requests come with."""
    num_collected: int = 0
    num_new: int = 0
    """Rows since the last training."""
    num_waits: int = 1
    """Factor of MIN_ROWS for the next training."""
    trained: int = 0
    """Number of the last training, over all pairs."""
    digest: str = ""
    """The adopted heads."""
    candidate: str = ""
    """Better heads that are being loaded."""
    replaced: str = ""
    """Heads that drafted before the adopted ones."""
    replaced_acceptance: float = 0.0
    """Acceptance of those heads."""
    acceptance: float = 0.0
    """Share of the newest steps in which the first draft of the heads in use was accepted."""
    num_observed: int = 0
    """Steps with drafts of the heads in use."""
    num_below: int = 0
    """Steps in a row with a lower acceptance than that of the replaced heads."""
    decisions: deque[HeadsDecision] = field(default_factory=lambda: deque(maxlen=MAX_DECISIONS))

    @property
    def heads(self) -> str:
        """The heads in use, "" for none."""
        return self.digest or self.given_digest

    @property
    def learned(self) -> set[str]:
        """All learned heads that it may need."""
        return {self.digest, self.candidate, self.replaced} - {"", self.given_digest}

    @property
    def is_due(self) -> bool:
        """Whether there are rows for the next training, and no new heads that are yet to be loaded."""
        return self.num_new >= MIN_ROWS * self.num_waits and not self.candidate

    @property
    def is_known(self) -> bool:
        """Whether the acceptance is that of enough steps."""
        return self.num_observed >= KNOWN_STEPS

    def observe(self, is_accepted: bool) -> None:
        """One more step with drafts of the heads in use."""
        self.num_observed += 1
        self.acceptance += (is_accepted - self.acceptance) / min(self.num_observed, ACCEPTANCE_STEPS)
        threshold = max(FLOOR, MARGIN * self.replaced_acceptance)
        is_below = self.digest and self.is_known and self.acceptance < threshold
        self.num_below = self.num_below + 1 if is_below else 0

    def record(self) -> Record:
        """What survives a restart."""
        heads = self.given_digest, self.digest, self.replaced
        return Record(self.pair, *heads, self.replaced_acceptance, tuple(self.decisions))

    def came_with(self, digest: str) -> None:
        """A request came with these heads, "" for none. If such drafted before the adopted ones, they would again."""
        if self.replaced == self.given_digest:
            self.replaced = digest
        self.given_digest = digest


class Learning:
    """The learning of one shard."""

    def __init__(
        self,
        scheduler: Scheduler,
        heads: HeadsPool,
        rings: Rings,
        records: Records,
        trainer: Trainer,
    ) -> None:
        self.rings = rings
        self._totals = pb.LearningTotals()
        self.pairs: dict[Pair, LearnedPair] = {}  # least recently used first
        self.trainer = trainer
        self._scheduler, self._heads, self._records = scheduler, heads, records
        self._num_pairs = self._num_jobs = 0
        self._collected: dict[Pair, tuple[list[int], list[int], list[int]]] = {}
        """Of the step that is being committed: number of the request, index of the row, and token, of each row."""
        self._due: dict[int, LearnedPair] = {}
        """Pairs that have rows for a training."""
        for record in records.read():
            self._restore(record)

    def prepare(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Before the forward pass of a step: keep its hidden rows if a request's output is collected."""
        self._heads.keeps_rows = any(pair_of(item.request) is not None for item in scheduled if item.num_sampled)

    def take_rows(self) -> torch.Tensor | None:
        """After it: these rows, [S, H] in bfloat16."""
        rows, self._heads.rows = self._heads.rows, None
        return None if rows is None else rows.to(torch.bfloat16)

    def collect(self, item: ScheduledRequest, first: int, token_ids: Sequence[int]) -> None:
        """The committed tokens of a request: they came from the step's rows from index `first` on."""
        request = item.request
        key = pair_of(request)
        if key is None:
            return
        pair = self._pair(key)
        pair.came_with(request.given_heads_digest)
        texts, rows, row_tokens = self._collected.setdefault(key, ([], [], []))
        texts += [request.order] * len(token_ids)
        rows += range(first, first + len(token_ids))
        row_tokens += token_ids
        if item.source == Source.MEDUSA and item.draft_ids and request.heads_digest == pair.heads:
            pair.observe(token_ids[0] == item.draft_ids[0])
            if pair.num_below >= REVERT_STEPS:
                self._revert(pair)

    def append(self, rows: torch.Tensor | None) -> None:
        """After all of a step's tokens: its rows, [S, H] in bfloat16, on the host; None if none were kept."""
        if rows is None or not self._collected:
            self._collected.clear()
            return
        # numpy has no bfloat16
        bits = rows.view(torch.int16).numpy().view(np.uint16)
        for key, (texts, indices, token_ids) in self._collected.items():
            self.rings.append(key, np.array(texts, np.int64), np.array(token_ids, np.int32), bits[indices])
            if (pair := self.pairs.get(key)) is not None:
                pair.num_collected += len(token_ids)
                pair.num_new += len(token_ids)
                if pair.is_due:
                    self._due[pair.number] = pair
            self._totals.num_rows += len(token_ids)
        self._collected.clear()

    def changed(self, digest: str, residency: Residency, reason: str) -> None:
        """Where an adapter is now."""
        for pair in list(self.pairs.values()):
            if pair.candidate == digest and residency is Residency.RESIDENT:
                self._use(pair, digest)
            elif pair.digest == digest and residency is Residency.RESIDENT:
                self._scheduler.swap_heads(pair.pair)
            elif residency is Residency.FAILED and digest in (pair.candidate, pair.digest):
                self._drop(pair, digest, reason)

    def trained(self, answer: Trained) -> None:
        """A job has ended."""
        self._totals.train_seconds += answer.seconds
        self._totals.cpu_seconds += answer.cpu_seconds
        pair = next((pair for pair in self.pairs.values() if pair.number == answer.pair), None)
        if pair is None:
            return
        if answer.error:
            self._totals.num_failed += 1
            self._decide(pair, "failed", answer.error, answer)
        elif not answer.heads_digest or not self._records.hold(answer.heads_digest):
            self._totals.num_rejected += 1
            self._decide(pair, "rejected", "no gain in a replay of the newest outputs", answer)
        else:
            pair.num_waits = 1
            pair.candidate = answer.heads_digest
            self._decide(pair, "adopted", "more tokens per step in a replay of the newest outputs", answer)
            self._scheduler.adapters.prefetch(answer.heads_digest)
            if self._scheduler.adapters.is_resident(answer.heads_digest):
                self._use(pair, answer.heads_digest)
            return
        pair.num_waits = min(2 * pair.num_waits, MAX_WAITS)

    def update(self) -> None:
        """Between steps: start a job if one is due."""
        if not self._due or self.trainer.state == "training":
            return
        due = [pair for pair in self._due.values() if pair.is_due]
        if not due:
            return
        pair = min(due, key=lambda pair: pair.trained)  # pairs take turns, whatever their traffic
        del self._due[pair.number]
        self._num_jobs += 1
        pair.trained = self._num_jobs
        blocks = self.rings.blocks(pair.pair)[-MAX_BLOCKS:]
        num_new, pair.num_new = pair.num_new, 0
        self.trainer.train(TrainingJob(pair.number, blocks, num_new, pair.pair[1], pair.heads, MIN_GAIN))

    def totals(self) -> pb.LearningTotals:
        """Since the shard's start."""
        self._totals.ring_bytes = self.rings.num_bytes
        return self._totals

    def flush(self) -> None:
        """Wait until all records are written."""
        self._records.flush()

    def answer(self, purge: bool) -> pb.LearningReply:
        """What is learned; with `purge` all rows, learned heads and decisions are deleted first."""
        if purge:
            self._purge()
        reply = pb.LearningReply(
            max_bytes=self.rings.layout.num_bytes,
            totals=self.totals(),
            trainer=self.trainer.state,
            training_s=self.trainer.training_s,
        )
        for pair in self.pairs.values():
            shown = reply.pairs.add(
                tenant=pair.pair[0],
                adapter_digest=pair.pair[1],
                num_rows=self.rings.num_rows(pair.pair),
                num_collected=pair.num_collected,
                heads_digest=pair.digest,
                replaced_digest=pair.replaced,
                acceptance=pair.acceptance,
                replaced_acceptance=pair.replaced_acceptance,
            )
            for decision in pair.decisions:
                shown.decisions.add(**asdict(decision))
        return reply

    def _purge(self) -> None:
        self.trainer.stop()
        self.rings.clear()
        for pair in self.pairs.values():
            self._scheduler.learned_heads.adopt(pair.pair, "")
            self._scheduler.swap_heads(pair.pair)
            for digest in pair.learned:
                self._scheduler.adapters.unload(digest)
        self._records.purge()
        self.pairs.clear()
        self._due.clear()
        log.info("learning_purged")

    def _pair(self, key: Pair) -> LearnedPair:
        pair = self.pairs.pop(key, None)
        if pair is None:
            self._num_pairs += 1
            pair = LearnedPair(key, self._num_pairs)
        self.pairs[key] = pair
        if len(self.pairs) > MAX_PAIRS:
            self._forget(next(iter(self.pairs)))
        return pair

    def _restore(self, record: Record) -> None:
        """A pair as it was before a restart."""
        pair = self._pair(record.pair)
        pair.given_digest = record.given_digest
        pair.decisions.extend(record.decisions)
        if not record.digest:
            return
        if not self._records.hold(record.digest):
            self._totals.num_failed += 1
            reason = "the learned heads are no longer in the adapter store"
            self._decide(pair, "failed", reason, Trained(pair.number, record.digest))
            if record.replaced not in ("", pair.given_digest):
                self._records.remove(record.replaced)
            return
        pair.digest = record.digest  # its first request loads it
        pair.replaced, pair.replaced_acceptance = record.replaced, record.replaced_acceptance
        if pair.replaced not in ("", pair.given_digest):
            self._records.hold(pair.replaced)
        self._scheduler.learned_heads.adopt(record.pair, record.digest)

    def _forget(self, key: Pair) -> None:
        """A pair that was not used for long starts anew when it is."""
        pair = self.pairs.pop(key)
        self._scheduler.learned_heads.adopt(key, "")
        self._due.pop(pair.number, None)
        for digest in pair.learned:
            self._records.release(digest)

    def _use(self, pair: LearnedPair, digest: str) -> None:
        """New heads are in a slot: they draft from the next step on."""
        oldest, pair.replaced = pair.replaced, pair.heads
        pair.replaced_acceptance = pair.acceptance if pair.heads and pair.is_known else 0.0
        pair.candidate, pair.digest = "", digest
        self._switch(pair)
        self._remove(pair, oldest)
        self._totals.num_adopted += 1
        log.info("learned_heads_adopted", digest=digest[:16], adapter=pair.pair[1][:16])

    def _revert(self, pair: LearnedPair) -> None:
        """The heads before draft again."""
        reason = (
            f"the first draft was accepted in {pair.acceptance:.2f} of the steps, with the heads before in "
            f"{pair.replaced_acceptance:.2f}, for {REVERT_STEPS} steps in a row"
        )
        self._totals.num_reverted += 1
        dropped, pair.digest = pair.digest, "" if pair.replaced == pair.given_digest else pair.replaced
        pair.replaced, pair.replaced_acceptance = "", 0.0
        self._decide(pair, "reverted", reason, Trained(pair.number, dropped))
        self._switch(pair)
        self._remove(pair, dropped)

    def _drop(self, pair: LearnedPair, digest: str, reason: str) -> None:
        """Heads could not be loaded."""
        self._totals.num_failed += 1
        unused = {digest}
        if pair.candidate == digest:
            pair.candidate = ""
        if pair.digest == digest:
            unused.add(pair.replaced)
            pair.digest = pair.replaced = ""
            pair.replaced_acceptance = 0.0
        self._decide(pair, "failed", f"the heads could not be loaded: {reason}", Trained(pair.number, digest))
        self._switch(pair)
        for name in unused:
            self._remove(pair, name)

    def _switch(self, pair: LearnedPair) -> None:
        """Let running requests use the heads that the pair has now."""
        pair.acceptance, pair.num_observed, pair.num_below = 0.0, 0, 0
        self._scheduler.learned_heads.adopt(pair.pair, pair.digest)
        self._scheduler.swap_heads(pair.pair)
        self._records.write(pair.record())

    def _remove(self, pair: LearnedPair, digest: str) -> None:
        """Heads that will not be used again. Those that requests came with are not ours."""
        if digest and digest not in (pair.given_digest, pair.digest, pair.candidate, pair.replaced):
            self._scheduler.adapters.unload(digest)
            self._records.remove(digest)

    def _decide(self, pair: LearnedPair, decision: str, reason: str, about: Trained) -> None:
        steps = about.tokens_per_step, about.tokens_per_step_before
        facts = about.heads_digest, *steps, about.num_rows, about.seconds
        pair.decisions.append(HeadsDecision(time.time(), decision, reason, *facts))
        self._records.write(pair.record())
        log.info("learning_decision", decision=decision, reason=reason, adapter=pair.pair[1][:16])

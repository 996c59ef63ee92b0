"""Learns Medusa heads while serving: collects rows, has heads trained, adopts those that are better, and reverts them.

Everything here runs between steps, in the step loop's thread, except writing and deleting files. Speculation is
lossless, so that heads change speed only.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import subprocess
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.learning import BLOCK_ROWS, Pair, RowBlock, RowsLayout, Trained, TrainerSettings, TrainingJob
from lorikeet.proto.process import start_connected
from lorikeet.shard.requests.request import ScheduledRequest, Source
from lorikeet.shard.scheduler.adapter_slots import Residency
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.speculation.medusa import pair_of

log = structlog.get_logger()

MODULE = "lorikeet.adapters.medusa.learning"
ENDED = "the trainer ended: its log has the reason"


class Trainer:
    """The trainer's process: started ahead of the first job or at it, ended by a purge, started again if it has ended.

    It is for Linux, as learning is, has the lowest priority of all processes, and does one job at a time. Its methods
    are called in one thread, and do not wait.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._cpus = os.sched_getaffinity(0)
        """Before the shard's threads were bound to one each."""
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._job: TrainingJob | None = None
        self._started = 0.0

    @property
    def state(self) -> str:
        """`stopped`, `idle` or `training`."""
        if self._job is not None:
            return "training"
        return "stopped" if self._running is None else "idle"

    @property
    def training_s(self) -> float:
        """How long the current job has run; 0 without one."""
        return 0.0 if self._job is None else time.monotonic() - self._started

    def start(self) -> None:
        """Start the process before there is a job: at idle priority its imports can take minutes on a busy machine."""
        if self._running is not None and self._running[0].poll() is None:
            return
        self.stop()
        process, end = start_connected(MODULE, inherits=[self._settings.rows_fd])
        os.sched_setaffinity(process.pid, self._cpus)
        # it computes only while a processor would be idle
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        self._running = process, Connection(end.detach())
        self._send(self._settings)

    def train(self, job: TrainingJob) -> None:
        """Start a job; none may run. It fits the socket's buffer."""
        assert self._job is None
        self.start()
        self._job, self._started = job, time.monotonic()
        self._send(job)

    def answer(self) -> Trained | None:
        """The answer to the job, an error if the process has ended; None if there is none yet."""
        if self._job is None or self._running is None or not self._running[1].poll():
            return None
        job, self._job = self._job, None
        try:
            answer = self._running[1].recv()
            assert isinstance(answer, Trained)
            return answer
        except (EOFError, OSError):
            log.error("trainer_ended", code=self._running[0].wait())
            self.stop()
            return Trained(job.pair, pb.LearningDecision(decision="failed", reason=ENDED), 0.0)

    def stop(self) -> None:
        """End the process with all that it has learned; a job gives no answer."""
        running, self._running, self._job = self._running, None, None
        if running is not None:
            running[0].kill()
            running[0].wait()
            running[1].close()

    def _send(self, message: TrainerSettings | TrainingJob) -> None:
        assert self._running is not None
        with contextlib.suppress(OSError):  # it has ended, as `answer` says
            self._running[1].send(message)


Bits = npt.NDArray[np.uint16]
"""Of bfloat16."""


class Rings:
    """The newest output tokens of each pair of tenant and adapter with their hidden states, in memory of bounded size.

    The memory is shared with the trainer's process and has no name, so that nothing of it reaches a disk (except as
    swap). If it is full, the pair with the most rows gives up its oldest block.
    """

    def __init__(self, layout: RowsLayout) -> None:
        """Raises OSError if the system has no memory files."""
        self.layout = layout
        self.fd = os.memfd_create("lorikeet-learning", os.MFD_CLOEXEC)
        """Descriptor of the memory."""
        os.ftruncate(self.fd, layout.num_bytes)
        self._memory = mmap.mmap(self.fd, layout.num_bytes)
        self._versions, self._rows = layout.arrays(memoryview(self._memory))
        self._free = list(reversed(range(layout.num_blocks)))
        self._rings: OrderedDict[Pair, deque[RowBlock]] = OrderedDict()
        """Blocks of each pair, oldest first; the least recently used pair first."""
        self._version = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that have rows."""
        return (self.layout.num_blocks - len(self._free)) * (self.layout.num_bytes // self.layout.num_blocks)

    def num_rows(self, pair: Pair) -> int:
        """Rows of a pair that are kept."""
        return _num_rows(self._rings.get(pair))

    def append(
        self, pair: Pair, texts: Sequence[int], token_ids: Sequence[int], hidden: npt.NDArray[np.uint16]
    ) -> None:
        """Add rows. texts, token_ids: [n]; hidden: [n, H] bits of bfloat16."""
        ring = self._rings.setdefault(pair, deque())
        self._rings.move_to_end(pair)
        first = 0
        while first < len(token_ids):
            if not ring or ring[-1].num_rows == BLOCK_ROWS:
                ring.append(self._take_block())
            number, version, num_rows = ring[-1]
            end = min(len(token_ids), first + BLOCK_ROWS - num_rows)
            start = number * BLOCK_ROWS + num_rows
            rows = self._rows[start : start + end - first]
            rows["text"], rows["token_id"], rows["hidden"] = texts[first:end], token_ids[first:end], hidden[first:end]
            ring[-1] = RowBlock(number, version, num_rows + end - first)
            first = end

    def blocks(self, pair: Pair) -> tuple[RowBlock, ...]:
        """The blocks of a pair, oldest first."""
        return tuple(self._rings.get(pair, ()))

    def clear(self) -> None:
        """Delete all rows, from the memory too."""
        self._rings.clear()
        self._free = list(reversed(range(self.layout.num_blocks)))
        self._memory.madvise(mmap.MADV_REMOVE)
        self._version += 1
        self._versions[:] = self._version

    def _take_block(self) -> RowBlock:
        if self._free:
            number = self._free.pop()
        else:
            # the least recently used of those with the most rows; the newest pair may have none, and needs the block
            pair, ring = max(self._rings.items(), key=lambda item: _num_rows(item[1]))
            number = ring.popleft().number
            if not ring and pair != next(reversed(self._rings)):
                del self._rings[pair]
        self._version += 1
        self._versions[number] = self._version
        return RowBlock(number, self._version, 0)


def _num_rows(ring: Sequence[RowBlock] | None) -> int:
    return (len(ring) - 1) * BLOCK_ROWS + ring[-1].num_rows if ring else 0


MAX_WAITS = 16
"""After each training without a gain the next one waits for twice as many rows, up to this factor of MIN_ROWS."""
MAX_BLOCKS = 2048
"""The newest blocks of a pair that one training reads: so many fit the buffer of a socket."""
MIN_GAIN = 1.02
"""Tokens per step of new heads over those in use, from which on they are adopted."""
REVERT_STEPS = 256
"""Steps in a row in which acceptance is below that of the heads before, after which these are used again."""
MARGIN = 0.98
"""Acceptance counts as lower below this part of the earlier one: it is a mean of random events."""
FLOOR = 0.02
"""Acceptance that heads need which replaced none."""
MAX_PAIRS = 1024
"""Pairs that are known; those that were not used for longest are dropped. At a start the newest records are read."""
MIN_ROWS = 2048
"""Rows of a pair that come between two of its trainings, at least."""
ACCEPTANCE_STEPS = 256
"""Steps over which acceptance is averaged."""
KNOWN_STEPS = 64
"""Steps until acceptance is known."""
MAX_DECISIONS = 20
"""Decisions that are kept of each pair."""
LOST = "the learned heads are no longer in the adapter store"
FOLDER = "learning"
"""Folder of the records in the adapter store."""


class LearnedPair:
    """The requests of one tenant with one adapter."""

    def __init__(self, key: Pair) -> None:
        self.key = key
        self.state = pb.LearnedPair(tenant=key[0], adapter_digest=key[1])
        """What administrators see of it, and what survives a restart."""
        self.given_digest = ""
        """The heads that requests come with, "" for none. They are an adapter like any other, and never deleted."""
        self.candidate = ""
        """Better heads that are being loaded."""
        self.locks: dict[str, int] = {}
        """Descriptor of the file of each learned heads that may be needed, locked in the adapter store."""
        self.num_new, self.num_waits, self.last_job = 0, 1, 0.0
        """Rows since the last training, the factor of MIN_ROWS for the next one, and when the last one started."""
        self.num_observed = self.num_below = 0
        """Steps with drafts of the heads in use, and those in a row in which these were accepted less."""

    @property
    def heads(self) -> str:
        """The heads in use, "" for none."""
        return self.state.heads_digest or self.given_digest

    @property
    def is_due(self) -> bool:
        """Whether there are rows for the next training, and no new heads that are yet to be loaded."""
        return self.num_new >= MIN_ROWS * self.num_waits and not self.candidate

    def observe(self, is_accepted: bool) -> None:
        """Count one more step with drafts of the heads in use."""
        state = self.state
        self.num_observed += 1
        state.acceptance += (is_accepted - state.acceptance) / min(self.num_observed, ACCEPTANCE_STEPS)
        is_known, threshold = self.num_observed >= KNOWN_STEPS, max(FLOOR, MARGIN * state.replaced_acceptance)
        is_below = bool(state.heads_digest) and is_known and state.acceptance < threshold
        self.num_below = self.num_below + 1 if is_below else 0

    def came_with(self, digest: str) -> None:
        """A request came with these heads, "" for none. If such drafted before the adopted ones, they would again."""
        if self.state.replaced_digest == self.given_digest:
            self.state.replaced_digest = digest
        self.given_digest = digest

    def lock(self, store: Path, digest: str) -> bool:
        """Keep heads in the store, which removes the least recently used files; returns whether they are there."""
        if digest not in self.locks:
            try:
                descriptor = os.open(store / f"{digest}.safetensors", os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            except OSError:
                return False
            self.locks[digest] = descriptor
        return True

    def unlock_all(self) -> None:
        """Let all its heads leave the store."""
        while self.locks:
            os.close(self.locks.popitem()[1])


class Records:
    """What survives a restart: a file for each pair in the adapter store. A thread changes files, so that no step waits
    for a disk.
    """

    def __init__(self, store: Path, base: tuple[str, str, str]) -> None:
        """`base`: hashes of configuration and weights, and the data type."""
        self.store, self._folder, self._base = store, store / FOLDER, list(base)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread = ThreadPoolExecutor(1, "learning-records")

    def read(self, is_whole: bool = False) -> list[tuple[str, pb.LearnedPair]]:
        """The heads that requests came with, and the pair, of the newest records of this base or of all, the newest one
        last.
        """
        self.flush()
        records = list[tuple[str, pb.LearnedPair]]()
        paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths if is_whole else paths[-MAX_PAIRS:]:
            try:
                record = json.loads(path.read_bytes())
                if record["base"] == self._base:
                    records.append((record["given_digest"], ParseDict(record["pair"], pb.LearnedPair())))
            except (OSError, ValueError, KeyError, TypeError, ParseError) as failure:
                log.warning("learning_record_not_read", file=path.name, reason=str(failure))
        return records

    def write(self, pair: LearnedPair) -> None:
        """Write the record of a pair, soon."""
        state = MessageToDict(pair.state, preserving_proto_field_name=True)
        record = json.dumps({"base": self._base, "given_digest": pair.given_digest, "pair": state})
        self._change(partial(_replace, self._path(pair.key), record))

    def remove(self, digest: str) -> None:
        """Delete heads from the store, soon."""
        self._change(partial(self._heads(digest).unlink, missing_ok=True))

    def flush(self) -> None:
        """Wait until everything is written and deleted."""
        self._thread.submit(lambda: None).result()

    def purge(self) -> None:
        """Delete all records of this base, and the learned heads that they name. Raises OSError."""
        records = self.read(is_whole=True)
        for _, state in records:
            digests = {state.heads_digest, state.replaced_digest, *(each.heads_digest for each in state.decisions)}
            for digest in digests - {"", *(given_digest for given_digest, _ in records)}:
                self._heads(digest).unlink(missing_ok=True)
            self._path((state.tenant, state.adapter_digest)).unlink(missing_ok=True)

    def _change(self, change: Callable[[], None]) -> None:
        def logged() -> None:
            try:
                change()
            except OSError as failure:
                log.warning("learning_file_not_changed", reason=str(failure))

        self._thread.submit(logged)

    def _heads(self, digest: str) -> Path:
        return self.store / f"{digest}.safetensors"

    def _path(self, key: Pair) -> Path:
        return self._folder / f"{hashlib.sha256(json.dumps([*self._base, *key]).encode()).hexdigest()}.json"


def _replace(path: Path, record: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(record)
    draft.chmod(0o600)
    draft.replace(path)


class Learning:
    """The learning of one shard."""

    def __init__(self, scheduler: Scheduler, rings: Rings, records: Records, trainer: Trainer) -> None:
        self.rings, self.trainer = rings, trainer
        self.pairs: dict[Pair, LearnedPair] = {}  # least recently used first
        self._scheduler, self._records = scheduler, records
        self.totals = pb.LearningTotals()
        """Since the shard's start."""
        self._collected: dict[Pair, tuple[list[int], list[int], list[int]]] = {}
        """Of the step that is being committed: number of the request, index of the row, and token, of each row."""
        self._due: set[Pair] = set()
        """Pairs that have rows for a training."""
        for given_digest, state in records.read():
            self._restore(given_digest, state)

    @staticmethod
    def collects(scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether the output of a request of the step is collected, with its hidden rows."""
        return any(pair_of(item.request) is not None for item in scheduled if item.num_sampled)

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
        collected, self._collected = self._collected, {}
        if rows is None:
            return
        # numpy has no bfloat16
        bits = rows.view(torch.int16).numpy().view(np.uint16)
        for key, (texts, indices, token_ids) in collected.items():
            self.rings.append(key, texts, token_ids, bits[indices])
            self.totals.num_rows += len(token_ids)
            if (pair := self.pairs.get(key)) is not None:
                pair.state.num_collected += len(token_ids)
                pair.num_new += len(token_ids)
                if pair.is_due:
                    self._due.add(key)
        self.totals.ring_bytes = self.rings.num_bytes

    def changed(self, digest: str, residency: Residency, reason: str) -> None:
        """An adapter is somewhere else now."""
        for pair in list(self.pairs.values()):
            state = pair.state
            if residency is Residency.RESIDENT and digest == pair.candidate:
                self._adopt(pair)
            elif residency is Residency.RESIDENT and digest == state.heads_digest:
                self._scheduler.swap_heads(pair.key, digest)
            elif residency is Residency.FAILED and digest in (pair.candidate, state.heads_digest):
                self._decide(pair, _failed(f"the heads could not be loaded: {reason}", digest))
                if digest == pair.candidate:
                    pair.candidate = ""
                    self._draft_with(pair, state.heads_digest, state.replaced_digest, state.replaced_acceptance)
                else:
                    self._draft_with(pair, "")

    def update(self) -> None:
        """Between steps: take the answer of a training that has ended, and start one that is due."""
        if not self.pairs:
            return
        if (answer := self.trainer.answer()) is not None:
            self._take(answer)
        due = [pair for key in self._due if (pair := self.pairs[key]).is_due] if self._due else []
        if due and self.trainer.state != "training":
            pair = min(due, key=lambda pair: pair.last_job)  # pairs take turns, whatever their traffic
            self._due.remove(pair.key)
            blocks, num_new = self.rings.blocks(pair.key)[-MAX_BLOCKS:], pair.num_new
            pair.last_job, pair.num_new = time.monotonic(), 0
            self.trainer.train(TrainingJob(pair.key, blocks, num_new, pair.heads, MIN_GAIN))

    def answer(self, purge: bool) -> pb.LearningReply:
        """What is learned; with `purge` all rows, learned heads and decisions are deleted first."""
        if purge:
            self._purge()
        for pair in self.pairs.values():
            pair.state.num_rows = self.rings.num_rows(pair.key)
        return pb.LearningReply(
            max_bytes=self.rings.layout.num_bytes,
            totals=self.totals,
            trainer=self.trainer.state,
            training_s=self.trainer.training_s,
            pairs=[pair.state for pair in self.pairs.values()],
        )

    def _purge(self) -> None:
        self.trainer.stop()
        self.rings.clear()
        self.totals.ring_bytes = 0
        for pair in self.pairs.values():
            pair.candidate = ""
            self._draft_with(pair, "")
        self._records.purge()
        self.pairs.clear()
        self._due.clear()
        log.info("learning_purged")

    def _pair(self, key: Pair) -> LearnedPair:
        self.pairs[key] = pair = self.pairs.pop(key, None) or LearnedPair(key)
        if len(self.pairs) > MAX_PAIRS:  # the oldest starts anew when it is used again
            oldest = self.pairs.pop(next(iter(self.pairs)))
            self._scheduler.swap_heads(oldest.key, "")
            self._due.discard(oldest.key)
            oldest.unlock_all()
        return pair

    def _restore(self, given_digest: str, state: pb.LearnedPair) -> None:
        """A pair as it was before a restart. The first request loads its heads."""
        pair = self._pair((state.tenant, state.adapter_digest))
        pair.state, pair.given_digest = state, given_digest
        state.num_rows, state.num_collected, state.acceptance = 0, 0, 0.0
        if state.replaced_digest not in ("", given_digest):
            pair.lock(self._records.store, state.replaced_digest)
        if not state.heads_digest:
            return
        if pair.lock(self._records.store, state.heads_digest):
            self._scheduler.swap_heads(pair.key, state.heads_digest)
        else:
            self._decide(pair, _failed(LOST, state.heads_digest))
            self._draft_with(pair, "")

    def _take(self, answer: Trained) -> None:
        """A training has ended."""
        decision = answer.decision
        self.totals.train_seconds += decision.seconds
        self.totals.cpu_seconds += answer.cpu_seconds
        pair = self.pairs.get(answer.pair)
        if pair is None:
            return
        digest = decision.heads_digest
        if digest and not pair.lock(self._records.store, digest):
            decision.decision, decision.reason = "failed", LOST
        self._decide(pair, decision)
        if decision.decision != "adopted":
            pair.num_waits = min(2 * pair.num_waits, MAX_WAITS)
            return
        pair.num_waits, pair.candidate = 1, digest
        self._scheduler.adapters.prefetch(digest)
        if self._scheduler.adapters.is_resident(digest):
            self._adopt(pair)

    def _adopt(self, pair: LearnedPair) -> None:
        """The new heads are in a slot: they draft from the next step on."""
        is_known = bool(pair.heads) and pair.num_observed >= KNOWN_STEPS
        digest, pair.candidate = pair.candidate, ""
        self._draft_with(pair, digest, pair.heads, pair.state.acceptance if is_known else 0.0)

    def _revert(self, pair: LearnedPair) -> None:
        """The heads before draft again."""
        state = pair.state
        reason = (
            f"the first draft was accepted in {state.acceptance:.2f} of the steps, with the heads before in "
            f"{state.replaced_acceptance:.2f}, for {REVERT_STEPS} steps in a row"
        )
        reverted = pb.LearningDecision(decision="reverted", reason=reason, heads_digest=state.heads_digest)
        self._decide(pair, reverted)
        self._draft_with(pair, "" if state.replaced_digest == pair.given_digest else state.replaced_digest)

    def _draft_with(self, pair: LearnedPair, digest: str, replaced: str = "", replaced_acceptance: float = 0.0) -> None:
        """Let other heads draft, "" for those that requests come with, and delete what is not needed any more."""
        state = pair.state
        state.heads_digest, state.replaced_digest, state.replaced_acceptance = digest, replaced, replaced_acceptance
        state.acceptance, pair.num_observed, pair.num_below = 0.0, 0, 0
        self._scheduler.swap_heads(pair.key, digest)
        for unneeded in set(pair.locks) - {digest, replaced, pair.candidate}:
            os.close(pair.locks.pop(unneeded))
            self._scheduler.adapters.unload(unneeded)
            self._records.remove(unneeded)
        self._records.write(pair)

    def _decide(self, pair: LearnedPair, decision: pb.LearningDecision) -> None:
        count = f"num_{decision.decision}"
        setattr(self.totals, count, getattr(self.totals, count) + 1)
        decision.time = time.time()
        pair.state.decisions.append(decision)
        del pair.state.decisions[:-MAX_DECISIONS]
        self._records.write(pair)
        adapter = pair.key[1][:16]
        log.info("learning_decision", decision=decision.decision, reason=decision.reason, adapter=adapter)


def _failed(reason: str, digest: str) -> pb.LearningDecision:
    return pb.LearningDecision(decision="failed", reason=reason, heads_digest=digest)

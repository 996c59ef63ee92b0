"""Schedules the loader's jobs: one per adapter for any number of callers, urgent ones first, several at a time.

Runs in one event loop. A `Gate` gives the owners of tickets fair turns: who asked, and where the adapter comes from. An
owner that used slots for long lately waits after others and holds few slots at once, so that adapters that take forever
delay only their own kind.
"""

import asyncio
import math
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lorikeet.adapters import errors
from lorikeet.adapters.errors import AdapterError
from lorikeet.adapters.loader.workers import Worker, WorkerExited, WorkerForkServer
from lorikeet.adapters.refs import Merge, Pin, Ref, SourceKind
from lorikeet.adapters.sized_cache import SizedCache
from lorikeet.adapters.sources.listed import ListedSource
from lorikeet.adapters.sources.registry import Sources
from lorikeet.adapters.store import Entry, Store

HALF_LIFE_S = 30.0
"""Half-life of an owner's recorded use, in seconds."""
_SMALL_USE_S = 1.0
"""An owner with less recorded use is not limited."""
_MAX_OWNERS = 4096
SLOW_S = 0.5
"""A conversion that takes longer gives up its slot, and goes on at the lowest priority."""
MAX_SLOW = 4
"""The most conversions that go on without a slot."""


@dataclass(eq=False)
class Ticket:
    """One request for a slot."""

    on_fast: Callable[[], None] = lambda: None
    """Called when a ticket that already has a slot moves to an extra one."""
    owners: tuple[str, ...] = ()
    is_urgent: bool = False
    is_inside: bool = False
    is_fast: bool = False
    """It has one of the extra slots for urgent tickets."""
    is_slow: bool = False
    """It gave up its slot and goes on at the lowest priority."""
    since: float = 0.0
    """When it got a slot."""
    _opened: asyncio.Event = field(default_factory=asyncio.Event)


class Uses:
    """How long owners have used slots, lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seconds: dict[str, tuple[float, float]] = {}
        """By owner, with the time at which it was that much; the last recorded one last."""

    def of(self, owner: str) -> float:
        """Seconds, halved every HALF_LIFE_S."""
        seconds, time_s = self._seconds.get(owner, (0.0, 0.0))
        return seconds * math.exp2((time_s - self.clock()) / HALF_LIFE_S)

    def add(self, owner: str, seconds: float) -> None:
        """Record the use of one slot."""
        self._seconds[owner] = (self.of(owner) + seconds, self.clock())
        self._seconds[owner] = self._seconds.pop(owner)
        if len(self._seconds) > _MAX_OWNERS:
            del self._seconds[next(iter(self._seconds))]


class Gate:
    """For one event loop."""

    def __init__(self, num_slots: int, num_fast: int, uses: Uses | None = None) -> None:
        self._num_slots, self._num_fast = num_slots, num_fast
        self._most_held = max(1, num_slots // 4)
        """Slots of an owner that used more than a little lately. The others stay free for other owners."""
        self._uses = Uses() if uses is None else uses
        self._tickets: dict[Ticket, None] = {}
        """With a slot and waiting, in order of arrival."""
        self._urgent: dict[Ticket, None] = {}
        """The urgent ones among them, in the order in which they became urgent."""

    @property
    def num_inside(self) -> int:
        return sum(ticket.is_inside for ticket in self._tickets)

    @property
    def num_waiting(self) -> int:
        return len(self._tickets) - self.num_inside

    async def enter(self, ticket: Ticket) -> None:
        """Wait for a slot. A cancelled wait has no effect."""
        self._tickets[ticket] = None
        if ticket.is_urgent:
            self._urgent[ticket] = None
        self._admit()
        try:
            await ticket._opened.wait()
        except asyncio.CancelledError:
            self.leave(ticket)
            raise

    def leave(self, ticket: Ticket) -> None:
        """Release the slot to the next ticket."""
        self._tickets.pop(ticket, None)
        self._urgent.pop(ticket, None)
        if ticket.is_inside:
            for owner in ticket.owners:
                self._uses.add(owner, self._uses.clock() - ticket.since)
        ticket.is_inside = ticket.is_fast = ticket.is_slow = False
        ticket._opened.clear()
        self._admit()

    def step_back(self, ticket: Ticket) -> bool:
        """Release the slot of a ticket that goes on. False where it has none or an extra one, or too many did so."""
        num_slow = sum(other.is_slow for other in self._tickets)
        if not ticket.is_inside or ticket.is_fast or ticket.is_slow or num_slow >= MAX_SLOW:
            return False
        ticket.is_slow = True
        self._admit()
        return True

    def prioritize(self, ticket: Ticket) -> None:
        """Move a ticket ahead of those that are not urgent, even before it calls `enter`."""
        ticket.is_urgent = True
        if ticket in self._tickets:
            self._urgent[ticket] = None
            self._admit()

    def share(self, ticket: Ticket, owners: tuple[str, ...]) -> None:
        """Others wait for the same: the ticket has the turn of those that used slots for less time."""
        use = self._use()
        if not ticket.is_inside and use(owners) < use(ticket.owners):
            ticket.owners = owners
            self._admit()

    def _admit(self) -> None:
        use = self._use()
        held = Counter(owner for ticket in self._inside() for owner in ticket.owners)

        def may_enter(ticket: Ticket) -> bool:
            return use(ticket.owners) <= _SMALL_USE_S or all(held[owner] < self._most_held for owner in ticket.owners)

        def give(num_free: int, tickets: Iterable[Ticket], is_fast: bool) -> None:
            for ticket in sorted(tickets, key=lambda waiting: use(waiting.owners)):
                if num_free <= 0:
                    return
                if ticket.is_inside or may_enter(ticket):
                    num_free -= 1
                    ticket.is_fast, ticket.is_slow = is_fast, False
                    held.update(() if ticket.is_inside else ticket.owners)
                    self._open(ticket)

        num_fast = sum(ticket.is_fast for ticket in self._urgent)
        give(self._num_fast - num_fast, [ticket for ticket in self._urgent if not ticket.is_fast], is_fast=True)
        num_free = self._num_slots - sum(not (ticket.is_fast or ticket.is_slow) for ticket in self._inside())
        waiting = [*self._urgent, *(ticket for ticket in self._tickets if not ticket.is_urgent)]
        give(num_free, [ticket for ticket in waiting if not ticket.is_inside], is_fast=False)

    def _inside(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets if ticket.is_inside]

    def _use(self) -> Callable[[tuple[str, ...]], float]:
        """The largest use among owners, with that of the slots that they hold now."""
        now, held = self._uses.clock(), defaultdict[str, float](float)
        for ticket in self._inside():
            for owner in ticket.owners:
                held[owner] += now - ticket.since
        return lambda owners: max((self._uses.of(owner) + held.get(owner, 0.0) for owner in owners), default=0.0)

    def _open(self, ticket: Ticket) -> None:
        """Let it in, or tell it that it moved to an extra slot."""
        if ticket.is_inside:
            ticket.on_fast()
        else:
            ticket.is_inside, ticket.since = True, self._uses.clock()
            ticket._opened.set()


REFUSED_S = 60.0
"""A pin that cannot be served is rejected for this long without another attempt."""


MAX_REFUSED_BYTES = 4 << 20


PAUSES_S = (0.05, 0.3, 1.0)
"""Before an adapter whose files have changed is looked up again, once after each."""


_MAX_IDLE = 1
"""Workers that are kept without a job. Each takes about 10 MiB of its own, and forking another takes milliseconds."""


IDLE_S = 60.0
"""Seconds without a job after which the processes that read adapters end. They take 200 MiB, and start in a second."""
CHECKED_S = 1.0
"""The same while adapters were only checked, as at the start of a server."""
SETTLE_S = 0.05
"""A local adapter that cannot be read may be one that is just written: if its files change within so long, it is read
again.
"""
EMPTY_GRACE_S = 10.0
"""An empty file that was written less than so long ago may still be written: on a busy disk that takes seconds."""


_FINAL = (errors.AdapterInvalid, errors.NotServed, errors.AdapterTooLarge)


@dataclass(eq=False)
class LoaderJob:
    """One adapter that is being loaded, and the number of callers that wait for it."""

    name: str
    token: str | None = field(default=None, repr=False)
    tokens: tuple[str | None, ...] = field(default=(), repr=False)
    """Access tokens for the adapters of a merge, one each."""
    num_waiting: int = 0
    fetching: Ticket = field(default_factory=Ticket)
    converting: Ticket = field(default_factory=Ticket)
    task: "asyncio.Task[Any] | None" = None
    worker: Worker | None = None
    restarts: bool = False
    """Its worker was killed so that another one starts over at normal priority."""
    parts: "list[LoaderJob]" = field(default_factory=list)
    """Jobs that fetch the adapters of a merge."""
    sources: tuple[str, ...] = ()
    """Where its adapters come from, as owners in the gates."""
    is_cancelled: bool = False
    """Nobody waits for it any more; it ends as soon as its worker has."""
    caller: str = ""
    """Who asked first; "" for the operator."""

    def __post_init__(self) -> None:
        self.fetching.on_fast = self.converting.on_fast = self._raise_priority

    def own(self, caller: str) -> None:
        """Before it enters a gate."""
        self.caller = caller
        self.fetching.owners = self.converting.owners = (*([caller] if caller else []), *self.sources)

    def _raise_priority(self) -> None:
        """Continue at normal priority if the system permits that, else start over."""
        if self.worker is not None and not self.worker.raise_priority():
            self.restarts = True
            self.worker.kill()


OnJob = Callable[[LoaderJob], None]


class Jobs:
    """All jobs of one loader."""

    def __init__(
        self, store: Store, fork_server: WorkerForkServer, sources: Sources, max_fetches: int, max_conversions: int
    ) -> None:
        self._store, self._fork_server, self._sources = store, fork_server, sources
        self._fetching = Gate(max_fetches, num_fast=max_fetches)
        # one at normal priority is fast enough, and more than one would slow the shards down
        self._converting = Gate(max_conversions, num_fast=1)
        self._jobs: dict[str, LoaderJob] = {}
        self._idle: list[Worker] = []
        self._num_at_work = 0
        self._idle_s = CHECKED_S
        self._resting = asyncio.get_running_loop().call_later(self._idle_s, self._rest)
        self._verifying: dict[str, asyncio.Task[bool]] = {}
        """By digest."""
        self._refused: SizedCache[str, dict[str, Any]] = SizedCache(
            MAX_REFUSED_BYTES, lambda key, refusal: len(key) + len(refusal["message"]), REFUSED_S
        )
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def fetch(self, pin: Pin, token: str | None, on_job: OnJob, caller: str = "") -> dict[str, Any]:
        """The pin's entry, now in the store, and the tier that it came from. `caller` has its own share of the slots;
        "" is the operator. Raises AdapterError.
        """
        return await self._repeated(lambda pins: self._fetched(pins[0], token, on_job, caller), (pin,), (token,))

    async def _fetched(self, pin: Pin, token: str | None, on_job: OnJob, caller: str) -> dict[str, Any]:
        if (entry := self._store.of_pin(pin)) is not None and await self.verify(entry.digest):
            return self._found(entry)
        key = f"{pin.source.value} {pin.id}@{pin.revision}"
        job = LoaderJob(pin.id, token, sources=_sources([pin]))
        return await self._shared(key, job, caller, on_job, lambda job: self._fetch(job, pin))

    async def _repeated(
        self,
        load: Callable[[tuple[Pin, ...]], Awaitable[dict[str, Any]]],
        pins: tuple[Pin, ...],
        tokens: Sequence[str | None],
    ) -> dict[str, Any]:
        """The result of `load`. Adapters whose files have changed since they were looked up are looked up again."""
        for seconds in PAUSES_S:
            try:
                return await load(pins)
            except errors.AdapterChanged:
                await asyncio.sleep(seconds)
                pins = tuple([await self._newest(pin, token) for pin, token in zip(pins, tokens, strict=True)])
        return await load(pins)

    async def _newest(self, pin: Pin, token: str | None) -> Pin:
        """The pin that the name has now. A commit of a hub never changes."""
        if pin.source is SourceKind.HUB:
            return pin
        return (await self._sources[pin.source].resolve(Ref(pin.source, pin.id), token)).pin

    async def verify(self, digest: str, again: bool = False) -> bool:
        """Whether a stored file's bytes match its checksum. They are read once per process, or `again`; a file that
        does not match is removed.
        """
        task = self._verifying.get(digest)
        if task is None and not again and self._store.is_intact(digest):
            return True
        if task is None:
            task = self._verifying[digest] = asyncio.create_task(asyncio.to_thread(self._store.verify, digest))
            task.add_done_callback(lambda _: self._verifying.pop(digest, None))
        return await asyncio.shield(task)

    def _found(self, entry: Entry) -> dict[str, Any]:
        self._counts["disk"] += 1
        return {**entry.as_dict(), "tier": "disk"}

    async def check(self, pin: Pin, token: str | None) -> dict[str, Any]:
        """What is known of a pin without its weights. Raises AdapterError if it would not be served."""
        if (entry := self._store.of_pin(pin)) is not None:
            size = {"num_bytes": entry.num_bytes, "num_heads": entry.num_heads}
            return {"rank": entry.rank, "modules": None, **size}
        call = {"do": "check", "pin": pin.as_dict(), "token": token}
        job = LoaderJob(pin.id, token)
        validation: dict[str, Any] = (await self._run(job, self._fetching, job.fetching, call))["validation"]
        return validation

    async def merge(
        self,
        merge: Merge,
        token: str | None,
        on_job: OnJob,
        caller: str = "",
        tokens: Sequence[str | None] | None = None,
    ) -> dict[str, Any]:
        """Fetch several adapters and merge them into one; `tokens` are their own, by default `token` for each."""
        own_tokens = (token,) * len(merge.pins) if tokens is None else tuple(tokens)

        def load(pins: tuple[Pin, ...]) -> Awaitable[dict[str, Any]]:
            return self._merged(replace(merge, pins=pins), token, own_tokens, on_job, caller)

        return await self._repeated(load, merge.pins, own_tokens)

    async def _merged(
        self,
        merge: Merge,
        token: str | None,
        own_tokens: tuple[str | None, ...],
        on_job: OnJob,
        caller: str,
    ) -> dict[str, Any]:
        known = [self._store.of_pin(pin) for pin in merge.pins]
        digests = [entry.digest for entry in known if entry is not None]
        if len(digests) == len(known):
            digest = merge.digest(digests)
            if self._store.touch(digest) and await self.verify(digest):
                return self._found(self._store.entry(digest))
        name = ", ".join(pin.id for pin in merge.pins)
        job = LoaderJob(name, token, own_tokens, sources=_sources(merge.pins))
        return await self._shared(f"merge {merge.as_dict()}", job, caller, on_job, lambda job: self._merge(job, merge))

    def share(self, job: LoaderJob, caller: str) -> None:
        """Another caller waits for a job: it has the turn of the one that used less of the loader lately."""
        owners = (*([caller] if caller else []), *job.sources)
        self._fetching.share(job.fetching, owners)
        self._converting.share(job.converting, owners)
        for part in job.parts:
            self.share(part, caller)

    def prioritize(self, job: LoaderJob) -> None:
        """Move a job ahead of the others, at normal priority, because a caller has waited long."""
        self._fetching.prioritize(job.fetching)
        self._converting.prioritize(job.converting)
        for part in job.parts:
            self.prioritize(part)

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring."""
        num_files, num_bytes = self._store.usage()
        return {
            "files": num_files,
            "bytes": num_bytes,
            "evicted": self._store.num_evicted,
            "jobs": len(self._jobs),
            "fetching": self._fetching.num_inside,
            "converting": self._converting.num_inside,
            "waiting": self._fetching.num_waiting + self._converting.num_waiting,
            "counts": dict(self._counts),
            "seconds": {name: round(seconds, 3) for name, seconds in self._seconds.items()},
        }

    async def end(self) -> None:
        """Stop all jobs."""
        self._resting.cancel()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _shared(
        self,
        key: str,
        new: LoaderJob,
        caller: str,
        on_job: OnJob,
        start: Callable[[LoaderJob], Any],
    ) -> dict[str, Any]:
        """The entry from the one job of that key: `new` is started unless one is already running."""
        while True:
            self._check_refused(key)
            job = self._jobs.get(key)
            if job is not None and job.is_cancelled:
                # the next job uses the same folder, so it starts once this one has left it
                assert job.task is not None
                await asyncio.wait({job.task})
                continue
            if job is None:
                job = self._jobs[key] = LoaderJob(new.name, new.token, new.tokens, sources=new.sources)
                job.own(caller)
                job.task = asyncio.create_task(self._guarded(key, job, start))
            else:
                self.share(job, caller)
            on_job(job)
            assert job.task is not None
            job.num_waiting += 1
            try:
                return {**(await asyncio.shield(job.task)).as_dict(), "tier": "source"}
            except (errors.AdapterNotAllowed, errors.AdapterNotFound):
                # another caller was rejected; this one may have access
                if job.token == new.token:
                    raise
            finally:
                job.num_waiting -= 1
                if job.num_waiting == 0 and not job.task.done():
                    job.is_cancelled = True
                    job.task.cancel()

    async def _guarded(self, key: str, job: LoaderJob, start: Callable[[LoaderJob], Any]) -> Any:
        try:
            return await start(job)
        except AdapterError as error:
            self._counts[type(error).__name__] += 1
            if isinstance(error, _FINAL):
                self._refused.put(key, error.as_dict())
            raise
        finally:
            del self._jobs[key]

    def _check_refused(self, key: str) -> None:
        if (refusal := self._refused.get(key)) is not None:
            raise errors.from_dict(refusal)

    async def _fetch(self, job: LoaderJob, pin: Pin) -> Entry:
        with self._work(str(pin.as_dict())) as work:
            folder = await self._download(job, pin, work)
            try:
                answer = await self._run(job, self._converting, job.converting, {"do": "convert", "folder": folder})
            except _FINAL:
                await self._check_unchanged(pin)
                raise
        entry = Entry.from_dict(answer["entry"])
        self._store.note(pin, entry)
        self._store.renew_hold(entry.digest)
        self._counts["source"] += 1
        return entry

    async def _merge(self, job: LoaderJob, merge: Merge) -> Entry:
        message = merge.as_dict()
        folders: list[str] = []
        with ExitStack() as works:
            for number, (pin, token) in enumerate(zip(merge.pins, job.tokens, strict=True)):
                part = LoaderJob(pin.id, token, sources=job.sources)
                part.fetching.owners = job.fetching.owners
                job.parts = [part]
                if job.fetching.is_urgent:
                    self.prioritize(part)
                work = works.enter_context(self._work(f"{number} of {message}"))
                folders.append(await self._download(part, pin, work))
            call = {"do": "merge", "folders": folders, "merge": message, "caller": job.caller}
            try:
                answer = await self._run(job, self._converting, job.converting, call)
            except _FINAL:
                await asyncio.gather(*map(self._check_unchanged, merge.pins))
                raise
        self._counts["merged"] += 1
        return Entry.from_dict(answer["entry"])

    async def _check_unchanged(self, pin: Pin) -> None:
        """Raises AdapterChanged for a folder that was being written: what was wrong there may be right soon."""
        source = self._sources[pin.source]
        if isinstance(source, ListedSource) and pin.source is SourceKind.LOCAL:
            await asyncio.sleep(SETTLE_S)
            for name, file in (await asyncio.to_thread(source.unchanged, pin)).items():
                if not file.size and time.time() - file.written_at < EMPTY_GRACE_S:
                    raise errors.AdapterChanged(
                        f"{name} of {pin.id} is empty and was written less than {EMPTY_GRACE_S:g} s ago: send the "
                        "request again once it is complete"
                    )

    @contextmanager
    def _work(self, name: str) -> Iterator[Path]:
        """A folder for the files of one job. If its source fails, the next attempt resumes from there."""
        work = self._store.work(name)
        try:
            yield work
        except errors.SourceUnreachable:
            raise
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)

    async def _download(self, job: LoaderJob, pin: Pin, work: Path) -> str:
        """The folder on this machine with the pin's files."""
        if pin.source is SourceKind.LOCAL:  # nothing is copied, so no worker is needed
            return str(await asyncio.to_thread(self._sources[pin.source].fetch, pin, job.token, work))
        call = {"do": "fetch", "pin": pin.as_dict(), "token": job.token, "folder": str(work)}
        return str((await self._run(job, self._fetching, job.fetching, call))["folder"])

    async def _run(self, job: LoaderJob, gate: Gate, ticket: Ticket, call: dict[str, Any]) -> dict[str, Any]:
        """Call a worker, and another one if the first was killed to raise the priority or ended while it was idle."""
        with self._at_work(CHECKED_S if call["do"] == "check" else IDLE_S):
            return await self._answered(job, gate, ticket, call)

    @contextmanager
    def _at_work(self, idle_s: float) -> Iterator[None]:
        """Inside, what reads adapters stays; after the last job, for `idle_s` or what an earlier job asked for."""
        self._num_at_work += 1
        self._idle_s = max(self._idle_s, idle_s)
        self._resting.cancel()
        try:
            yield
        finally:
            self._num_at_work -= 1
            if not self._num_at_work:
                self._resting = asyncio.get_running_loop().call_later(self._idle_s, self._rest)

    def _rest(self) -> None:
        """End what reads adapters until the next job."""
        for worker in self._idle:
            worker.leave()
        self._idle.clear()
        self._idle_s = CHECKED_S
        self._fork_server.rest()

    async def _answered(self, job: LoaderJob, gate: Gate, ticket: Ticket, call: dict[str, Any]) -> dict[str, Any]:
        await gate.enter(ticket)
        began = time.monotonic()
        watching = asyncio.create_task(self._step_back(job, ticket)) if gate is self._converting else None
        try:
            while True:
                job.restarts = False
                job.worker = await self._take(ticket.is_fast)
                if ticket.is_fast and not job.worker.raise_priority():
                    await self._give_back(job)
                    continue
                try:
                    return await job.worker.call({**call, "name": job.name})
                except AdapterError:
                    await job.worker.end()  # it may keep memory of what it has read
                    raise
                except WorkerExited as exited:
                    if not (job.restarts or exited.was_idle):
                        raise exited.as_error(job.name) from None
                finally:
                    await self._give_back(job)
        finally:
            if watching is not None:
                watching.cancel()
            gate.leave(ticket)
            self._seconds["convert" if call["do"] == "merge" else call["do"]] += time.monotonic() - began

    async def _step_back(self, job: LoaderJob, ticket: Ticket) -> None:
        """Let a conversion that takes long step back, so that others do not wait for it."""
        await asyncio.sleep(SLOW_S)
        while not self._converting.step_back(ticket):  # noqa: ASYNC110 - others leave at any time
            await asyncio.sleep(SLOW_S)
        if job.worker is not None:
            job.worker.step_back()

    async def _take(self, is_fast: bool) -> Worker:
        for worker in self._idle:
            if not is_fast or worker.raise_priority():
                self._idle.remove(worker)
                return worker
        return await self._fork_server.worker(steps_back=not is_fast)

    async def _give_back(self, job: LoaderJob) -> None:
        worker, job.worker = job.worker, None
        if worker is None or worker.is_ended:
            return
        task = asyncio.current_task()
        is_mid_job = task is not None and task.cancelling() > 0
        if is_mid_job or worker.is_slow or len(self._idle) >= _MAX_IDLE:
            await worker.end()
        else:
            worker.lower_priority()
            self._idle.append(worker)


def _sources(pins: Sequence[Pin]) -> tuple[str, ...]:
    """Who may have made these adapters: the hub's account, the folder of the store; a local one stands for itself."""
    names = (pin.id if pin.source is SourceKind.LOCAL else pin.id.rpartition("/")[0] for pin in pins)
    return tuple(dict.fromkeys(f"{pin.source.value}:{name}" for pin, name in zip(pins, names, strict=True)))

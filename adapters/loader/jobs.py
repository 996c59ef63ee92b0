"""What the loader does and in which order: one job per adapter however many wait, the urgent first, several at a time.

Knows pins, the store and readers; nothing of sockets to the router. Lives in one event loop.
"""

import asyncio
import shutil
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from lorikeet.adapters.digests import Merge
from lorikeet.adapters.errors import (
    AdapterError,
    AdapterInvalid,
    AdapterNotAllowed,
    AdapterNotFound,
    AdapterTooLarge,
    NotServed,
    SourceUnreachable,
)
from lorikeet.adapters.loader.gate import Gate, Ticket
from lorikeet.adapters.loader.readers import ForkServer, Reader, ReaderEnded
from lorikeet.adapters.pin import Pin
from lorikeet.adapters.refs import Source
from lorikeet.adapters.sources.registry import Sources
from lorikeet.adapters.store import Entry, Store

log = structlog.get_logger()

REFUSED_S = 60.0
"""So long a version of an adapter that cannot be served is refused without another look."""
_MOST_REFUSED = 4096
_MOST_RESTING = 4
_FINAL = (AdapterInvalid, NotServed, AdapterTooLarge)


@dataclass(eq=False)
class Job:
    """One adapter on its way, and who waits for it."""

    name: str
    token: str | None = field(default=None, repr=False)
    num_waiting: int = 0
    fetching: Ticket = field(default_factory=Ticket)
    converting: Ticket = field(default_factory=Ticket)
    task: "asyncio.Task[Any] | None" = None
    reader: Reader | None = None
    begins_again: bool = False
    """Its reader was ended so that another begins again at normal priority."""
    parts: "list[Job]" = field(default_factory=list)
    """Of a merge: the jobs that fetch what is merged."""

    def __post_init__(self) -> None:
        self.fetching.on_fast = self.converting.on_fast = self._hasten

    @property
    def is_urgent(self) -> bool:
        return self.fetching.is_urgent

    def _hasten(self) -> None:
        """What is under way goes on at normal priority, where the system allows that; else it begins again."""
        if self.reader is not None and not self.reader.hasten():
            self.begins_again = True
            self.reader.kill()


class Jobs:
    """All jobs of one loader."""

    def __init__(
        self, store: Store, fork_server: ForkServer, sources: Sources, max_fetches: int, max_conversions: int
    ) -> None:
        self._store = store
        self._fork_server = fork_server
        self._sources = sources
        self._fetching = Gate(max_fetches, num_fast=max_fetches)
        # one at normal priority is fast enough for all, and no more than one is felt by who computes
        self._converting = Gate(max_conversions, num_fast=1)
        self._jobs: dict[str, Job] = {}
        self._resting: list[Reader] = []
        self._refused: OrderedDict[str, tuple[AdapterError, float]] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    async def fetch(self, pin: Pin, token: str | None, on_job: Callable[[Job], None]) -> tuple[Entry, str]:
        """What the pin holds, in the store now, and where it came from. Raises AdapterError."""
        entry = self._store.of_pin(pin)
        if entry is not None:
            self._counts["disk"] += 1
            return entry, "disk"
        key = f"{pin.source.value} {pin.id}@{pin.revision}"
        entry = await self._shared(key, pin.id, token, on_job, lambda job: self._fetch(job, pin))
        return entry, "source"

    async def check(self, pin: Pin, token: str | None) -> dict[str, Any]:
        """What can be said of a pin without its weights. Raises AdapterError where it would not be served."""
        entry = self._store.of_pin(pin)
        if entry is not None:
            known = {"rank": entry.rank, "modules": None, "num_bytes": entry.num_bytes}
            return {**known, "num_heads": entry.num_heads}
        job = Job(pin.id, token)
        question = {"do": "check", "pin": pin.as_dict(), "token": token}
        verdict: dict[str, Any] = (await self._done(job, self._fetching, job.fetching, question, "check"))["verdict"]
        return verdict

    async def merge(self, wanted: Merge, token: str | None, on_job: Callable[[Job], None]) -> tuple[Entry, str]:
        """The same for several as one."""
        known = [self._store.of_pin(pin) for pin in wanted.pins]
        digests = [entry.digest for entry in known if entry is not None]
        if len(digests) == len(known):
            digest = wanted.digest(digests)
            if self._store.touch(digest):
                self._counts["disk"] += 1
                return self._store.entry(digest), "disk"
        key, name = f"merge {wanted.as_dict()}", ", ".join(pin.id for pin in wanted.pins)
        entry = await self._shared(key, name, token, on_job, lambda job: self._merge(job, wanted))
        return entry, "source"

    def hasten(self, job: Job) -> None:
        """Someone has waited long: before the others now, and at normal priority."""
        self._fetching.hasten(job.fetching)
        self._converting.hasten(job.converting)
        for part in job.parts:
            self.hasten(part)

    def stats(self) -> dict[str, Any]:
        """Numbers for whoever watches."""
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
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _shared(
        self, key: str, name: str, token: str | None, on_job: Callable[[Job], None], start: Callable[[Job], Any]
    ) -> Any:
        """The result of the one job of that key, started here unless it is under way."""
        while True:
            self._check_refused(key)
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = Job(name, token)
                job.task = asyncio.create_task(self._guarded(key, job, start))
            on_job(job)
            try:
                return await self._result(job)
            except (AdapterNotAllowed, AdapterNotFound):
                # refused to another caller: this one's right is its own
                if job.token == token:
                    raise

    async def _result(self, job: Job) -> Any:
        assert job.task is not None
        job.num_waiting += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.num_waiting -= 1
            if job.num_waiting == 0 and not job.task.done():
                job.task.cancel()

    async def _guarded(self, key: str, job: Job, start: Callable[[Job], Any]) -> Any:
        try:
            return await start(job)
        except AdapterError as error:
            self._counts[type(error).__name__] += 1
            if isinstance(error, _FINAL):
                self._refused[key] = (error, time.monotonic())
                if len(self._refused) > _MOST_REFUSED:
                    self._refused.popitem(last=False)
            raise
        finally:
            del self._jobs[key]

    def _check_refused(self, key: str) -> None:
        error, at = self._refused.get(key, (None, 0.0))
        if error is not None and time.monotonic() - at < REFUSED_S:
            raise error.with_traceback(None)

    async def _fetch(self, job: Job, pin: Pin) -> Entry:
        with self._work(str(pin.as_dict())) as work:
            folder = await self._bring(job, pin, work)
            answer = await self._convert(job, {"do": "convert", "folder": folder})
        entry = Entry.from_dict(answer["entry"])
        self._store.note(pin, entry)
        self._counts["source"] += 1
        return entry

    async def _merge(self, job: Job, wanted: Merge) -> Entry:
        words = wanted.as_dict()
        folders: list[str] = []
        with ExitStack() as works:
            for number, pin in enumerate(wanted.pins):
                part = Job(pin.id, job.token)
                job.parts = [part]
                if job.is_urgent:
                    self.hasten(part)
                work = works.enter_context(self._work(f"{number} of {words}"))
                folders.append(await self._bring(part, pin, work))
            answer = await self._convert(job, {"do": "merge", "folders": folders, "merge": words})
        self._counts["merged"] += 1
        return Entry.from_dict(answer["entry"])

    @contextmanager
    def _work(self, name: str) -> Iterator[Path]:
        """A folder for one job's files on their way. What a broken attempt left there is found by the next."""
        work = self._store.work(name)
        try:
            yield work
        except SourceUnreachable:
            raise
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)

    async def _bring(self, job: Job, pin: Pin, work: Path) -> str:
        """The folder on this machine that holds the pin's files."""
        if pin.source is Source.LOCAL:  # found, not moved: no work for a process of its own
            return str(await asyncio.to_thread(self._sources[pin.source].fetch, pin, job.token, work))
        question = {"do": "fetch", "pin": pin.as_dict(), "token": job.token, "folder": str(work)}
        return str((await self._done(job, self._fetching, job.fetching, question, "fetch"))["folder"])

    async def _convert(self, job: Job, question: dict[str, Any]) -> dict[str, Any]:
        return await self._done(job, self._converting, job.converting, question, "convert")

    async def _done(self, job: Job, gate: Gate, ticket: Ticket, question: dict[str, Any], what: str) -> dict[str, Any]:
        """Have a reader do it, and another one where the first was ended to make haste."""
        await gate.enter(ticket)
        began = time.monotonic()
        try:
            while True:
                job.begins_again = False
                job.reader = await self._take(ticket.is_fast)
                if ticket.is_fast and not job.reader.hasten():
                    await self._give_back(job)
                    continue
                try:
                    return await job.reader.ask({**question, "name": job.name})
                except ReaderEnded as ended:
                    if not job.begins_again:
                        raise ended.as_error(job.name) from None
                finally:
                    await self._give_back(job)
        finally:
            gate.leave(ticket)
            self._seconds[what] += time.monotonic() - began

    async def _take(self, is_fast: bool) -> Reader:
        for reader in self._resting:
            if not is_fast or reader.hasten():
                self._resting.remove(reader)
                return reader
        return await self._fork_server.reader(steps_back=not is_fast)

    async def _give_back(self, job: Job) -> None:
        reader, job.reader = job.reader, None
        if reader is None or reader.is_ended:
            return
        task = asyncio.current_task()
        is_mid_job = task is not None and task.cancelling() > 0
        if is_mid_job or len(self._resting) >= _MOST_RESTING:
            await reader.end()
        else:
            reader.rest()
            self._resting.append(reader)

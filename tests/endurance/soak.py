"""A long run of one server: a hundred thousand short requests, while shards and the loader are killed now and then.

Two replicas of the embedded model with adapters, heads and a draft model; streams and whole answers, base and four
adapters, four methods, clients that go away, malformed bodies. Every answer must be right. At the end pages, files and
descriptors are released, and the router is no larger than after the first fifth.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.evidence.figure import Case, Raw
from benchmarks.load import servers
from tests.endurance import hostile_requests, leaks
from tests.endurance.faults import FLAGS, Fleet
from tests.endurance.hostile_requests import Attempt, post

REQUESTS = 100_000
WARM_UP = 0.2
"""Share of the requests after which the router should have reached its size."""
CLIENTS = 16
REQUESTS_PER_FAULT = 1_000
LOADER_EVERY = 4
"""One fault in this many is the loader's; the others are shards'."""
LEAVES, BAD = 0.1, 0.1
"""Shares of requests whose client goes away, and of those that are wrong."""
LARGEST_BAD = 4_096
WRONG = [make for make in hostile_requests.BAD if len(make(random.Random(0)).payload) <= LARGEST_BAD]
SETTLED_S = 120.0
SEED = 83_000
PROMPTS = ("def add(a, b):", "class A:", "import os", "for i in range(3):", "x = [", "return")
ADAPTERS = (None, "json", "sql", "cite", "question")
METHODS = ("off", "lookup", "draft", "medusa")


def tiny(draw: random.Random) -> Attempt:
    """One to eight tokens, of any adapter, by any method, streamed or not."""
    count, adapter, method = draw.randint(1, 8), draw.choice(ADAPTERS), draw.choice(METHODS)
    parameters: dict[str, Any] = {"max_new_tokens": count, "ignore_eos_token": True, "details": True}
    parameters |= {"speculative_method": method}
    if adapter is not None:
        parameters["adapter_id"] = adapter
    if method == "medusa" and adapter != "cite":
        parameters["heads_id"] = "heads"
    if draw.random() < 0.5:
        parameters |= {"do_sample": True, "seed": draw.randrange(1 << 30), "temperature": 0.8}
    streams = draw.random() < 0.5
    body = json.dumps({"inputs": draw.choice(PROMPTS), "parameters": parameters}).encode()

    def right(status: int, answer: bytes) -> bool:
        if streams:
            answer = answer[answer.rindex(b"data:") + 5 :]
        return status == 200 and bool(json.loads(answer)["details"]["generated_tokens"] == count)

    path = "/generate_stream" if streams else "/generate"
    return Attempt(f"{method} {adapter or 'base'}{' streamed' * streams}", post(path, body), right)


def attempts(draw: random.Random, count: int) -> Iterator[Attempt]:
    """`count` random requests."""
    for _ in range(count):
        kind = draw.random()
        if kind < LEAVES:
            good = tiny(draw)
            yield Attempt("cancelled", good.payload, good.right, draw.uniform(0.0, 0.2))
        elif kind < LEAVES + BAD:
            yield draw.choice(WRONG)(draw)
        else:
            yield tiny(draw)


@dataclass
class Server:
    """The processes of a running server, and what they hold."""

    server: servers.RunningServer
    fleet: Fleet = field(init=False)
    folder: Path = field(init=False)
    """The private one of this run."""

    def __post_init__(self) -> None:
        self.fleet = Fleet(self.server)
        found = re.search(r"unix:(\S+)/shard-\d\.sock", self.server.log.read_text(errors="replace"))
        assert found is not None
        self.folder = Path(found[1])

    def pid(self, module: str) -> int:
        """The process that runs a package of ours. Raises LookupError while there is none."""
        for pid in servers.group(self.server.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if f"lorikeet.{module}".encode() in words[:4]:
                return pid
        raise LookupError(f"{module} does not run")

    def holds(self) -> dict[str, Any]:
        """Descriptors of router and loader, files of the run, and the router's memory in KiB."""
        router, loader = self.pid("router"), self.pid("adapters")
        status = Path(f"/proc/{router}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert resident is not None
        return {
            "router_files": len(os.listdir(f"/proc/{router}/fd")),
            "loader_files": len(os.listdir(f"/proc/{loader}/fd")),
            "files": sorted(path.name for path in self.folder.rglob("*")),
            "router_kib": int(resident[1]),
        }

    def await_another(self, index: int, pid: int) -> None:
        """That shard is another process than this. Raises TimeoutError."""
        until = time.monotonic() + SETTLED_S
        while time.monotonic() < until:
            with contextlib.suppress(LookupError, OSError):
                if self.fleet.pid(index) != pid:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"shard {index} was not started again")

    def settled(self, same_as: dict[str, Any] | None = None) -> dict[str, Any]:
        """What is held once nothing runs, and all that `same_as` held is there; or as it is after a while."""
        until = time.monotonic() + SETTLED_S
        while True:
            pages = leaks.idle_pages(self.server.port)
            try:
                held = self.holds() | pages
                if same_as is None or all(held[name] == same_as[name] for name in ("router_files", "files")):
                    return held
            except LookupError:
                if time.monotonic() > until:
                    raise
                time.sleep(1)
                continue
            if time.monotonic() > until:
                return held
            time.sleep(1)


class Faults:
    """Kills a process after the given number of requests, once what was killed last has recovered."""

    def __init__(self, server: Server, draw: random.Random) -> None:
        self._server = server
        self._draw = draw
        self.done: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def next(self) -> None:
        """Another one, unless the last is still recovering."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(asyncio.to_thread(self._kill))

    def _kill(self) -> None:
        if self.done.total() % LOADER_EVERY == 1:
            os.kill(self._server.pid("adapters"), signal.SIGKILL)
            self.done["loader"] += 1
            return
        index = self._draw.randrange(2)
        for each in range(2):
            self._server.fleet.await_served(each)
        pid = self._server.fleet.pid(index)
        os.kill(pid, signal.SIGKILL)
        self.done["shard"] += 1
        self._server.await_another(index, pid)

    async def last(self) -> None:
        """Until the last one has happened."""
        if self._task is not None:
            await self._task


async def run(server: Server, draw: random.Random, count: int, faults: Faults, wrong: list[str]) -> None:
    """`count` requests of `CLIENTS` clients, with faults."""
    waiting = enumerate(attempts(draw, count))

    async def client() -> None:
        for number, tried in waiting:
            if number % REQUESTS_PER_FAULT == REQUESTS_PER_FAULT // 2:
                faults.next()
            if result := await leaks.send(server.server.port, tried):
                wrong.append(f"{tried.kind}: {result}"[:300])

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def recovered(server: Server, draw: random.Random, faults: Faults, wrong: list[str]) -> None:
    """Requests go on until every shard has answered one since it was started."""

    async def well() -> None:
        await faults.last()
        for index in range(2):
            await asyncio.to_thread(server.fleet.await_served, index)

    waiting = asyncio.create_task(well())
    while not waiting.done():
        await run(server, draw, CLIENTS, faults, wrong)
    await waiting


def soaked(count: int, note: Callable[[str], None] = lambda text: None) -> Case:
    """One server, the given number of requests."""
    draw = random.Random(SEED)
    wrong: list[str] = []
    early = round(count * WARM_UP)
    with servers.running("soak", servers.lorikeet(None, *FLAGS)) as running:
        server = Server(running)
        faults = Faults(server, random.Random(SEED + 1))
        begun = time.monotonic()

        async def phase(number: int) -> None:
            await run(server, draw, number, faults, wrong)
            await recovered(server, draw, faults, wrong)

        uvloop.run(phase(early))
        before = server.settled()
        note(f"after {early}: {before}")
        uvloop.run(phase(count - early))
        after = server.settled(before)
        note(f"after {count}: {after}")
        raw = {
            "requests": count,
            "seconds": round(time.monotonic() - begun, 1),
            "faults": dict(faults.done),
            "num_wrong": len(wrong),
            "wrong": wrong[:20],
            "before": before,
            "after": after,
        }
        error = "" if running.alive() else f"server ended: {servers.tail(running.log)}"
    return Case("life", raw, error)


def growth(raw: Raw) -> float:
    """Growth of the router's memory after the warm-up."""
    return float(raw["after"]["router_kib"] / raw["before"]["router_kib"] - 1)


def num_kept(raw: Raw) -> float:
    """Pages, descriptors, and files of the run that are still there when nothing runs any more."""
    before, after = raw["before"], raw["after"]
    files = len(set(after["files"]) - set(before["files"]))
    held = sum(max(0, after[name] - before[name]) for name in ("router_files", "loader_files"))
    return float(after["pages_held"] + after["requests_inside"] + files + held)

"""One load from several client processes: a single one cannot read more than some ten thousand events per second."""

import asyncio
import gc
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import uvloop

from lorikeet.launcher.bench import load
from lorikeet.launcher.bench.load import ConnectionPool, LoadGenerator, LoadResult
from lorikeet.launcher.bench.workload import Planned

START_TIMEOUT_S = 120.0
"""Until all processes are ready; they begin together."""


@dataclass(frozen=True)
class ClientSettings:
    """What every client process needs."""

    url: str
    headers: dict[str, str]
    timeout_s: float
    api: str
    """A key of `load.APIS`."""
    model: str
    fields: dict[str, Any]
    """Fields of every request."""
    ignores_eos: bool

    def connections(self) -> ConnectionPool:
        """To the server."""
        return ConnectionPool(self.url, self.headers, self.timeout_s)

    def generator(
        self, connections: ConnectionPool, max_concurrency: int | None, *, shows_progress: bool
    ) -> LoadGenerator:
        """Sends requests over these connections."""
        api = load.APIS[self.api](self.model, self.fields, self.ignores_eos)
        return LoadGenerator(connections, api, max_concurrency, shows_progress=shows_progress)


def check(count: int, num_prompts: int, max_concurrency: int | None) -> None:
    """Raises ValueError if so many processes would not all have something to send."""
    if count < 1:
        raise ValueError("--processes must be at least 1")
    if count > num_prompts:
        raise ValueError(f"--processes {count} is more than the {num_prompts} requests")
    if max_concurrency is not None and count > max_concurrency:
        raise ValueError(f"--processes {count} is more than --max-concurrency {max_concurrency}")


def run(count: int, settings: ClientSettings, plan: Sequence[Planned], max_concurrency: int | None) -> LoadResult:
    """Each process sends every `count`-th request of the plan, with its share of the requests at a time. Raises
    ValueError if a process ends early.
    """
    context = multiprocessing.get_context("spawn")
    barrier, readers = context.Barrier(count), list[Connection]()
    for index in range(count):
        limit = None if max_concurrency is None else len(range(index, max_concurrency, count))
        reader, writer = context.Pipe(duplex=False)
        arguments = (settings, plan[index::count], limit, barrier, writer)
        context.Process(target=_run_one, args=arguments, daemon=True).start()
        writer.close()
        readers.append(reader)
    try:
        parts: list[LoadResult] = [reader.recv() for reader in readers]
    except EOFError:
        raise ValueError("a client process ended before its load was complete") from None
    samples = [parts[index % count].samples[index // count] for index in range(len(plan))]
    return LoadResult(samples, max(part.duration for part in parts), sum(part.client_cpu_s for part in parts), count)


def _run_one(
    settings: ClientSettings,
    plan: Sequence[Planned],
    max_concurrency: int | None,
    barrier: Barrier,
    writer: Connection,
) -> None:
    writer.send(uvloop.run(_load(settings, plan, max_concurrency, barrier)))


async def _load(
    settings: ClientSettings, plan: Sequence[Planned], max_concurrency: int | None, barrier: Barrier
) -> LoadResult:
    connections = settings.connections()
    generator = settings.generator(connections, max_concurrency, shows_progress=False)
    gc.freeze()  # the collector would pause the client for every thousand events
    await asyncio.to_thread(barrier.wait, START_TIMEOUT_S)
    try:
        return await generator.run(plan)
    finally:
        await connections.close()

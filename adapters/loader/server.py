"""The loader's interface to the router: a private Unix socket, one JSON object per line each way, answers in any order.

Callers' tokens are passed on to jobs and never written anywhere.
"""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import structlog

from lorikeet.adapters.errors import AdapterError, LoaderFailed
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.adapters.loader.jobs import Jobs, LoaderJob
from lorikeet.adapters.loader.workers import MAX_LINE_BYTES, WorkerForkServer
from lorikeet.adapters.refs import Merge, Pin
from lorikeet.adapters.sources.registry import Sources
from lorikeet.adapters.store import Store
from lorikeet.proto.process import usable_cores

log = structlog.get_logger()

MAX_CONVERSIONS = 4
"""Adapters are small, and shards need the other cores."""

MAX_OUTSTANDING = 65_536


class Cancelled(LoaderFailed):
    """The caller cancelled the call."""

    status = 499


class LazyJobs:
    """The jobs and their store, from the first call on: what reads adapters takes seconds and memory to start."""

    def __init__(self, config: LoaderConfig, config_path: Path) -> None:
        self._config = config
        self._fork_server = WorkerForkServer(config_path, config.preload)
        self._sources = Sources(config.sources)
        self._opening: asyncio.Task[tuple[Jobs, Store]] | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """How the process that reads adapters has ended."""
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> tuple[Jobs, Store]:
        """Start what reads adapters, unless it runs. Raises LoaderFailed for a base that cannot be read."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._opened())
        try:
            return await asyncio.shield(self._opening)
        except (ValueError, OSError) as error:
            self._opening = None  # the next caller tries again
            raise LoaderFailed(f"no adapter can be read: {error}", status=503, retry_after=5.0) from None

    async def _opened(self) -> tuple[Jobs, Store]:
        config = self._config
        store = Store(config.adapter_store, config.store_bytes, await self._fork_server.base_key())
        await asyncio.to_thread(store.sweep)
        max_conversions = config.max_conversions or min(MAX_CONVERSIONS, usable_cores())
        jobs = Jobs(store, self._fork_server, self._sources, config.max_fetches, max_conversions)
        self._watch = asyncio.create_task(self._wait_for_end())
        log.info("loader_started", store=config.adapter_store)
        return jobs, store

    async def _wait_for_end(self) -> None:
        self.ended.set_result(await self._fork_server.ended())

    async def close(self) -> None:
        """Stop all jobs."""
        if self._opening is not None and not self._opening.cancel() and not self._opening.exception():
            await self._opening.result()[0].end()
        await self._sources.close()

    def kill(self) -> None:
        """End what reads adapters."""
        self._fork_server.close()


class Connection:
    """One caller."""

    def __init__(self, loading: LazyJobs, writer: asyncio.StreamWriter) -> None:
        self._loading, self._writer = loading, writer
        self._jobs: Jobs | None = None
        """None until they were opened."""
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, LoaderJob] = {}
        self._urgent: set[int] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the caller disconnects; then jobs without another caller are cancelled."""
        try:
            while (line := await _read_line(reader)) != b"":
                if line is None:
                    await self._fail(None, f"a call is one line of at most {MAX_LINE_BYTES} bytes", 413)
                else:
                    await self._receive(line)
        except OSError:
            log.warning("loader_call_unreadable")
        finally:
            for task in self._calls.values():
                task.cancel()
            self._writer.close()

    async def _receive(self, line: bytes) -> None:
        try:
            body = json.loads(line)
            number = body["call"]
            if type(number) is not int:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            await self._fail(None, "this is not a call: send a JSON object with an integer `call`", 400)
            return
        if "urgent" in body:
            self._prioritize(body["urgent"])
            await self._send({"call": number})
        elif "share" in body:
            job = self._running.get(body["share"]) if type(body["share"]) is int else None
            if job is not None and self._jobs is not None:
                self._jobs.share(job, str(body.get("caller", "")))
            await self._send({"call": number})
        elif "cancel" in body:
            task = self._calls.get(body["cancel"]) if type(body["cancel"]) is int else None
            if task is not None:
                task.cancel()
            await self._send({"call": number, "cancelled": task is not None})
        elif number in self._calls or len(self._calls) >= MAX_OUTSTANDING:
            await self._fail(number, "too many calls at once", 503)
        else:
            self._calls[number] = asyncio.create_task(self._call(number, body))

    async def _call(self, number: int, body: dict[str, Any]) -> None:
        try:
            answer = await self._answer(number, body)
        except AdapterError as error:
            answer = {"error": error.as_dict()}
        except ValueError as error:
            answer = {"error": LoaderFailed(f"this call is invalid: {error}", status=400).as_dict()}
        except asyncio.CancelledError:
            answer = {"error": Cancelled("the call was cancelled").as_dict()}
        except Exception as error:
            log.exception("loader_call_failed")
            answer = {"error": LoaderFailed(f"the loader failed: {type(error).__name__}").as_dict()}
        finally:
            del self._calls[number]
            self._running.pop(number, None)
            self._urgent.discard(number)
        await self._send({"call": number, **answer})

    async def _answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        token, caller = body.get("token"), str(body.get("caller", ""))
        jobs, store = await self._loading.open()
        self._jobs = jobs

        def on_job(job: LoaderJob) -> None:
            self._running[number] = job
            if number in self._urgent:
                jobs.prioritize(job)

        if "fetch" in body:
            return await jobs.fetch(Pin.from_dict(body["fetch"]), token, on_job, caller)
        if "merge" in body:
            merge, tokens = Merge.from_dict(body["merge"]), body.get("tokens")
            if tokens is not None and (not isinstance(tokens, list) or len(tokens) != len(merge.pins)):
                raise ValueError("`tokens` must be a list, one per adapter")
            return await jobs.merge(merge, token, on_job, caller, tokens)
        if "check" in body:
            return await jobs.check(Pin.from_dict(body["check"]), token)
        if "forget" in body:
            return {"forgotten": await asyncio.to_thread(store.remove, str(body["forget"]))}
        if "verify" in body:
            return {"intact": await jobs.verify(str(body["verify"]), again=True)}
        if "hold" in body:
            return {"held": store.hold(str(body["hold"]))}
        if "release" in body:
            store.release(str(body["release"]))
            return {}
        if "stats" in body:
            return {"stats": jobs.stats()}
        raise ValueError(f"it has no known operation, only {', '.join(sorted(body))[:80]}")

    def _prioritize(self, number: Any) -> None:
        if number in self._calls:
            self._urgent.add(number)
        if number in self._running and self._jobs is not None:
            self._jobs.prioritize(self._running[number])

    async def _fail(self, number: int | None, message: str, status: int) -> None:
        await self._send({"call": number, "error": LoaderFailed(message, status=status).as_dict()})

    async def _send(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps(answer).encode() + b"\n")
            await self._writer.drain()


async def _read_line(reader: asyncio.StreamReader) -> bytes | None:
    """The next line; None for one above the reader's limit, which is skipped; b"" at the end."""
    is_too_long = False
    while True:
        try:
            line = await reader.readuntil()
        except asyncio.LimitOverrunError as overrun:
            await reader.readexactly(overrun.consumed)
            is_too_long = True
        except asyncio.IncompleteReadError:
            return b""
        else:
            return None if is_too_long else line


async def run(config: LoaderConfig, config_path: Path) -> None:
    """Serve until SIGTERM. Raises ValueError or OSError if the loader cannot start."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    # an interrupt at the terminal reaches all processes, but the parent decides when they end
    loop.add_signal_handler(signal.SIGINT, ended.set if config.parent_pid is None else lambda: None)
    loading = LazyJobs(config, config_path)
    try:
        server = await _listen(config, loading)
        stop: asyncio.Future[Any] = asyncio.create_task(ended.wait())
        await asyncio.wait({loading.ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        await loading.close()
        if not ended.is_set():
            code = loading.ended.result()
            raise ValueError(f"the process that reads adapters has ended{f' with exit code {code}' if code else ''}")
    finally:
        loading.kill()


async def _listen(config: LoaderConfig, loading: LazyJobs) -> asyncio.Server:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the loader ends
            await Connection(loading, writer).serve(reader)

    umask = os.umask(0o177)
    try:
        # replaces the socket of an earlier process
        return await asyncio.start_unix_server(accept, config.socket, limit=MAX_LINE_BYTES)
    finally:
        os.umask(umask)

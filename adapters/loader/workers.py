"""The loader's worker processes: the process that forks them, and how the loader starts, calls and ends them.

`python -m lorikeet.adapters.loader.workers FD CONFIG.json` loads what workers need once, then forks them. It has one
thread, so that forking is safe: a worker costs milliseconds and few pages of its own. `jobs` decides which job is next.
"""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from lorikeet.adapters.errors import AdapterChanged, AdapterError, AdapterInvalid, LoaderFailed, from_dict
from lorikeet.adapters.loader.config import LoaderConfig
from lorikeet.proto import logs, process
from lorikeet.proto.children import Forked, ForkServer, ProcessEnded, answer, serve_forks
from lorikeet.proto.process import end_with_parent, lower_priority

MAX_LINE_BYTES = 4 << 20
NICENESS, SLOW_NICENESS = 9, 19
"""Added to one's own, and for jobs that take long. A process that did not step back leaves 12 % of its core: hardly
felt, but not nothing.
"""
_STARTING_S = 300.0


class WorkerExited(Exception):
    """A worker's process ended before it answered a job."""

    def __init__(self, status: int, was_idle: bool) -> None:
        super().__init__(f"exited with {status}")
        self.status = status
        """Exit code, negative for a signal."""
        self.was_idle = was_idle
        """Whether it waited for a job after an earlier one. It did not start this one."""

    def as_error(self, name: str) -> AdapterError:
        """The error for the adapter that the worker was processing."""
        if self.status == -signal.SIGPROF:
            problem = (
                "reading it takes too much processor time: check the patterns of its adapter_config.json, and convert"
                " .bin files to safetensors"
            )
            return AdapterInvalid(f"the adapter {name} cannot be served: {problem}")
        if self.status == -signal.SIGABRT:  # how libraries in Rust end if there is no memory
            problem = "reading it needs more memory than its size explains"
            return AdapterInvalid(f"the adapter {name} cannot be served: {problem}")
        if self.status == -signal.SIGBUS:
            return AdapterChanged(f"the files of the adapter {name} changed while they were read")
        return LoaderFailed(f"the loader's worker exited while it read {name} ({self.status})", status=503)


class Worker(Forked):
    """One process, for one job at a time."""

    def __init__(self, fork_server: "WorkerForkServer", pid: int, connection: socket.socket, steps_back: bool) -> None:
        super().__init__(fork_server, pid, connection, MAX_LINE_BYTES)
        self._steps_back = steps_back
        """Whether it runs at low priority now."""
        self.is_slow = False
        """Whether its job took so long that it runs behind other jobs. It gets no further job."""
        self.is_ended = False

    async def call(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises the adapter's error, or WorkerExited."""
        has_worked, started = self._streams is not None, b""
        try:
            await self.send(json.dumps(job).encode())
            started = await self.receive()
            line = await self.receive()
        except ProcessEnded:
            self.is_ended = True
            self.close()
            raise WorkerExited(await self.status(), has_worked and not started) from None
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise from_dict(answer["error"])
        return answer

    def raise_priority(self) -> bool:
        """To normal, even in the middle of a job; whether the system permits that."""
        if self._steps_back and process.raise_priority(self._pid):
            self._steps_back = False
        return not self._steps_back

    def step_back(self) -> None:
        """Run behind all other jobs."""
        self.is_slow = self._steps_back = True
        with contextlib.suppress(OSError):
            process.lower_priority(SLOW_NICENESS, self._pid)

    def lower_priority(self) -> None:
        """Below that of all other processes, after a job."""
        if not self._steps_back:
            with contextlib.suppress(OSError):
                process.lower_priority(NICENESS, self._pid)
                self._steps_back = True

    def leave(self) -> None:
        """Forget the process, which ends with the one that forked it."""
        self.is_ended = True
        self.close()

    async def end(self) -> None:
        """End the process in any state."""
        if not self.is_ended:
            self.is_ended = True
            self.kill()
            self.close()
            await self.status()


class WorkerForkServer(ForkServer):
    """The process that forks workers."""

    def __init__(self, config_path: Path, preload: str | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        module = "lorikeet.adapters.loader.workers"
        super().__init__(module, str(config_path), start_s=_STARTING_S, preload=preload, env=environment)
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that end the workers of cancelled callers."""
        self._base: tuple[str, str, str] | None = None
        self._starting = asyncio.Lock()
        self._started = asyncio.Event()

    async def base_key(self) -> tuple[str, str, str]:
        """Start it; the base's key in the store. Raises ValueError if the base cannot be read, or has changed."""
        answer = await self.start()
        if "base" not in answer:
            raise ValueError(str(answer.get("failed") or f"the process that reads adapters {self.ending()}"))
        base, weights, dtype = answer["base"]
        key = str(base), str(weights), str(dtype)
        if self._base not in (None, key):
            raise ValueError("the base model's files have changed since the server started")
        self._base = key
        self._started.set()
        return key

    def rest(self) -> None:
        """End it until the next worker is needed. Without a preloaded process it stays: it would start for seconds."""
        if self._preload is not None:
            self.close()

    def close(self) -> None:
        self._started.clear()
        super().close()

    async def ended(self) -> int:
        """Wait for its own end, while it does not rest; returns the exit code."""
        while True:
            await self._started.wait()
            process = self._process
            code = await super().ended()
            if process is self._process:
                return code

    async def worker(self, steps_back: bool) -> Worker:
        """A new process. Raises LoaderFailed. A process whose caller is cancelled meanwhile is ended."""
        forking = asyncio.create_task(self._worker(steps_back))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            self._ending.add(ending := asyncio.create_task(_end_forked(forking)))
            ending.add_done_callback(self._ending.discard)
            raise

    async def _worker(self, steps_back: bool) -> Worker:
        async with self._starting:
            if self._control is None:
                await self._start_again()
        return Worker(self, *await self.fork(steps_back=steps_back), steps_back)

    async def _start_again(self) -> None:
        """Raises LoaderFailed; the next caller tries again."""
        try:
            await self.base_key()
        except (ValueError, OSError) as error:
            self.close()
            raise LoaderFailed(f"no adapter can be read: {error}", status=503, retry_after=5.0) from None

    async def _call(self, message: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        try:
            return await super()._call(message, *descriptors)
        except ProcessEnded:
            error = LoaderFailed("the process that reads adapters is gone", status=503, retry_after=5.0)
            raise error from None


async def _end_forked(forking: "asyncio.Task[Worker]") -> None:
    with contextlib.suppress(LoaderFailed):
        await (await forking).end()


def main() -> None:
    """Serve the parent until it closes the socket."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # the loader decides when its workers end
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    warnings.simplefilter("ignore")
    try:
        config = LoaderConfig.read(sys.argv[2])
        logs.configure(config.json_output, config.log_level, "loader")
        # after the parent's end is watched for: these take seconds
        import torch

        from lorikeet.adapters.loader import worker

        torch.set_num_threads(1)
        logs.adopt_libraries()
        context = worker.WorkerContext(config)
        logs.adopt_libraries()  # for the libraries that the base's code imported
    except (ValueError, OSError, KeyError, ImportError) as error:
        answer(control, {"failed": " ".join(str(error).split())[:500]})
        return
    gc.collect()
    gc.freeze()
    answer(control, {"base": context.base_key()})

    def work(connection: socket.socket, options: dict[str, Any]) -> None:
        if options["steps_back"]:
            lower_priority(NICENESS)
        worker.serve(context, connection)

    serve_forks(control, work)


if __name__ == "__main__":
    main()

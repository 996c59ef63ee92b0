"""The router process: event loop, HTTP server, and its end in named stages (drain, cut, close).

The first SIGTERM or SIGINT drains: probes and new requests get 503 while running ones finish. A later one forces,
unless there is a parent: that kills when it means it, and whoever signals a whole server signals both. SIGUSR1 hands
over to another router on the same socket: no new connection is taken, those that are there are answered to their end.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn
import uvloop

from lorikeet.proto.process import signal_at_parent_death
from lorikeet.router.api.app import create_app
from lorikeet.router.api.service import Service
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import RouterError
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.text.tokenizer import Tokenizer

log = structlog.get_logger()

SAME_REQUEST_S = 0.5
"""A signal so soon after another was sent for the same reason: `timeout` sends two at once."""
FLUSH_TIMEOUT_S = 5
"""How long connections may take to send what they have after the last generation ended."""


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RouterServer:
    """Serves until told to end."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._tokenizer = Tokenizer.load(config)
        self._metrics = Metrics(config.max_input_length, config.max_total_tokens)
        self._ending = asyncio.Event()
        self._leaving = asyncio.Event()
        self._signalled_at: float | None = None
        self._server: _Uvicorn | None = None
        self._problem: str | None = None
        """Why it ends by itself."""
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve; the exit code."""
        config = self._config
        dispatcher = Dispatcher(config, self._tokenizer, self._metrics)
        app = create_app(dispatcher, self._tokenizer, config, self._metrics)
        self._server = server = _Uvicorn(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=4096,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
                lifespan="off",
            )
        )
        service: Service = app.state.service
        self._handle_signals(service)
        await dispatcher.start()
        keeping = asyncio.create_task(self._keep(service))
        if config.replacement_file is not None and await asyncio.to_thread(Path(config.replacement_file).exists):
            await self._until_ready(service)
        fd = config.listen_fd
        listener = _listen(config.hostname, config.port) if fd is None else _inherited(fd)
        # What exists now lives as long as the process: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        watching = asyncio.create_task(self._watch_parent())
        telling = asyncio.create_task(self._tell_ready(service))
        log.info("router_listening", hostname=config.hostname, port=listener.getsockname()[1])
        ending, leaving = asyncio.create_task(self._ending.wait()), asyncio.create_task(self._leaving.wait())
        await asyncio.wait([serving, ending, leaving, keeping], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            await self._finish(server, dispatcher)
        elif not serving.done():
            log.info("router_draining", num_active=dispatcher.num_active, timeout_s=config.drain_timeout_s)
            whole = await dispatcher.drain(config.drain_timeout_s)
            log.info("router_drained", whole=whole)
        server.should_exit = True
        await serving
        for task in (watching, ending, leaving, keeping, telling):
            task.cancel()
        await service.receipts.close()
        await service.templates.close()
        await dispatcher.stop()
        await asyncio.to_thread(service.usage.close)
        self._tokenizer.close()
        return 0 if self._problem is None else 1

    async def _finish(self, server: "_Uvicorn", dispatcher: Dispatcher) -> None:
        """Wait for the connections that are there; what takes too long is cut."""
        log.info("router_hands_over", num_active=dispatcher.num_active)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                while server.server_state.connections:  # noqa: ASYNC110 - uvicorn tells nobody
                    await asyncio.sleep(0.05)
        except TimeoutError:
            await dispatcher.drain(0.0)

    async def _until_ready(self, service: Service) -> None:
        while not (service.dispatcher.ready and service.settled):  # noqa: ASYNC110 - two things in several places
            await asyncio.sleep(0.02)

    async def _tell_ready(self, service: Service) -> None:
        """Once requests are welcome."""
        if self._config.ready_file is None:
            return
        await self._until_ready(service)
        await asyncio.to_thread(Path(self._config.ready_file).touch)

    async def _keep(self, service: Service) -> None:
        """Look after the operator's adapters. Ends where one is broken and that is meant to end everything."""
        if service.preloader is None:
            await asyncio.Event().wait()
            return
        running = asyncio.create_task(service.preloader.run())
        try:
            await service.preloader.settled.wait()
            directory, is_strict = service.selection.directory, self._config.strict_adapters
            problems = [line for line in directory.listed() if line.problem]
            fatal = [line for line in problems if is_strict or line.alias == directory.default]
            if fatal:  # without the adapter of all who name none, hardly anybody could be answered
                first = f"{fatal[0].alias[:256]}: {fatal[0].problem[:512]}"
                self._problem = f"{len(fatal)} adapters cannot be served, first {first}"
                log.error("router_cannot_serve", reason=self._problem)
                return
            await running
        finally:
            running.cancel()

    def _hung_up(self, service: Service) -> None:
        """SIGHUP: the operator's files are others now."""
        service.usage.reopen()
        if self._config.catalogue_path is not None or self._config.keys_path is not None:
            self._reload(service)

    def _reload(self, service: Service) -> None:
        async def reload() -> None:
            try:
                await service.reloading.reload()
            except RouterError as error:
                log.error("catalogue_not_reloaded", reason=str(error)[:4096])

        self._reloads.add(task := asyncio.create_task(reload()))
        task.add_done_callback(self._reloads.discard)

    def _handle_signals(self, service: Service) -> None:
        loop, config = asyncio.get_running_loop(), self._config
        if any(path is not None for path in (config.catalogue_path, config.keys_path, config.usage_log)):
            loop.add_signal_handler(signal.SIGHUP, self._hung_up, service)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGUSR1, self._hand_over, service)

    def _hand_over(self, service: Service) -> None:
        if self._server is not None and self._server.started:
            for listening in self._server.servers:
                listening.close()
            service.dispatcher.is_leaving = True
            self._leaving.set()

    def _signalled(self) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self._ending.set()
        elif self._config.parent_pid is None and now - self._signalled_at >= SAME_REQUEST_S:
            log.warning("router_forced")
            sys.stderr.flush()
            os._exit(1)

    async def _watch_parent(self) -> None:
        """End with the parent, also where the kernel does not see to it."""
        parent = self._config.parent_pid
        while parent is not None:
            if os.getppid() != parent:
                log.error("router_orphaned", parent_pid=parent)
                os._exit(1)
            await asyncio.sleep(1.0)


def _listen(hostname: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with one sentence."""
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((hostname, port))
        listener.listen(4096)
    except OSError as error:
        raise OSError(f"can't listen on {hostname}:{port}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def _inherited(descriptor: int) -> socket.socket:
    """A socket that a parent has bound; it stays open there, so that nobody is turned away between two routers."""
    listener = socket.socket(fileno=descriptor)
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def serve(config: RouterConfig) -> int:
    """Run a router until it is told to end; the exit code. A failure is one line of log that says what is wrong."""
    if config.parent_pid is not None:
        signal_at_parent_death()

    async def run() -> int:
        return await RouterServer(config).run()

    try:
        return uvloop.run(run())
    except (ValueError, OSError) as error:
        log.error("router_cannot_serve", reason=str(error))
    except Exception:
        log.exception("router_ends")
    return 1

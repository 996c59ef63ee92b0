"""The router process: event loop, HTTP server, signals and shutdown.

The first SIGTERM or SIGINT drains: probes and new requests get 503 while running ones finish. A later one exits at
once, unless there is a parent: a signal to the process group reaches both, and the parent kills the router itself.
SIGUSR1 hands over to another router on the same socket: the open connections are served to their end, no new ones.
"""

import asyncio
import errno
import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path

import structlog
import uvloop

from lorikeet.proto.process import (
    REST_S,
    keep_objects,
    raise_file_limit,
    report_failure,
    return_freed_memory,
    share_freed_memory,
    signal_at_parent_death,
)
from lorikeet.router.api.app import create_app
from lorikeet.router.api.service import Service
from lorikeet.router.config import RouterConfig
from lorikeet.router.dispatch.dispatcher import Dispatcher
from lorikeet.router.errors import RouterError
from lorikeet.router.http_protocol import HttpServer
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.text.tokenizer import Tokenizer

log = structlog.get_logger()

SAME_REQUEST_S = 0.5
"""Signals that are less than this apart count as one: `timeout` sends two at once."""


class RouterServer:
    """Serves until a signal ends it, or the operator's adapters cannot be served."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._tokenizer = Tokenizer.load(config)
        self._metrics = Metrics.configured(config)
        self._draining = asyncio.Event()
        self._handing_over = asyncio.Event()
        self._signalled_at: float | None = None
        self._server: HttpServer | None = None
        self._problem: str | None = None
        """Why it ends without a signal."""
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve; returns the exit code."""
        dispatcher = Dispatcher(self._config, self._tokenizer, self._metrics)
        app = create_app(dispatcher, self._tokenizer, self._config, self._metrics)
        service: Service = app.state.service
        self._server = HttpServer(app, self._config, self._metrics.connection_rejected)
        self._handle_signals(service)
        await dispatcher.start()
        await self._serve(self._server, service)
        await service.receipts.close()
        await service.templates.close()
        service.grammars.close()
        await service.outputs.close()
        await dispatcher.stop()
        await asyncio.to_thread(service.usage.close)
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)
        service.bodies.close()
        self._tokenizer.close()
        return 0 if self._problem is None else 1

    async def _serve(self, server: HttpServer, service: Service) -> None:
        """Serve until a signal or a broken adapter, then drain or hand over."""
        config, dispatcher = self._config, service.dispatcher
        preloading = asyncio.create_task(self._preload(service))
        if config.replacement_file is not None and await asyncio.to_thread(Path(config.replacement_file).exists):
            await self._until_ready(service)
        listener = _listen(config)
        keep_objects()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        warming = asyncio.create_task(service.outputs.start())
        memory = return_memory(self._metrics, dispatcher)
        watches = (self._watch_parent(), self._touch_ready_file(service), _watch_files(listener), memory)
        background = [preloading, warming, *map(asyncio.create_task, watches)]
        log.info("router_listening", hostname=config.hostname, port=listener.getsockname()[1])
        signals = [asyncio.create_task(event.wait()) for event in (self._draining, self._handing_over)]
        await asyncio.wait([serving, preloading, *signals], return_when=asyncio.FIRST_COMPLETED)
        if self._handing_over.is_set():
            await self._finish_connections(server, dispatcher)
        elif not serving.done():
            log.info("router_draining", num_active=dispatcher.num_active, timeout_s=config.drain_timeout_s)
            log.info("router_drained", complete=await dispatcher.drain(config.drain_timeout_s))
        server.should_exit = True
        await serving
        for task in (*background, *signals):
            task.cancel()

    async def _finish_connections(self, server: HttpServer, dispatcher: Dispatcher) -> None:
        """Wait for the open connections, and end them at `drain_timeout_s`."""
        log.info("router_handover", num_active=dispatcher.num_active)
        server.leave()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                while server.server_state.connections:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.05)
        except TimeoutError:
            await dispatcher.drain(0.0)

    async def _until_ready(self, service: Service) -> None:
        while not (service.dispatcher.ready and service.adapters_checked):  # noqa: ASYNC110 - several conditions
            await asyncio.sleep(0.02)

    async def _touch_ready_file(self, service: Service) -> None:
        """Create `ready_file` once requests are accepted."""
        if self._config.ready_file is None:
            return
        await self._until_ready(service)
        await asyncio.to_thread(Path(self._config.ready_file).touch)
        await asyncio.to_thread(return_freed_memory)  # of reading the tokenizer

    async def _preload(self, service: Service) -> None:
        """Keep the operator's adapters loaded. Returns where a broken one must end the router."""
        if service.preloader is None:
            await asyncio.Event().wait()
            return
        running = asyncio.create_task(service.preloader.run())
        try:
            await service.preloader.settled.wait()
            directory, is_strict = service.selection.directory, self._config.strict_adapters
            problems = [line for line in directory.listed() if line.problem]
            fatal = [line for line in problems if is_strict or line.alias == directory.default]
            if fatal:  # without the default adapter hardly any request could be served
                first = f"{fatal[0].alias[:256]}: {fatal[0].problem[:512]}"
                self._problem = f"{len(fatal)} adapters cannot be served, first {first}"
                _fail(self._config, self._problem)
                return
            await running
        finally:
            running.cancel()

    def _reload_files(self, service: Service) -> None:
        """SIGHUP: the operator's files have changed, or were moved away."""
        service.usage.reopen()
        service.receipts.reopen()
        if self._config.catalogue_path is None and self._config.keys_path is None:
            return

        async def reload() -> None:
            try:
                await service.reloading.reload()
            except RouterError as error:
                log.error("catalogue_not_reloaded", reason=str(error)[:4096])

        self._reloads.add(task := asyncio.create_task(reload()))
        task.add_done_callback(self._reloads.discard)

    def _handle_signals(self, service: Service) -> None:
        loop, config = asyncio.get_running_loop(), self._config
        files = (config.catalogue_path, config.keys_path, config.usage_log, config.receipts_path)
        if any(path is not None for path in files):
            loop.add_signal_handler(signal.SIGHUP, self._reload_files, service)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminate)
        loop.add_signal_handler(signal.SIGUSR1, self._hand_over, service)

    def _hand_over(self, service: Service) -> None:
        if self._server is not None and self._server.started:
            for listening in self._server.servers:
                listening.close()
            service.dispatcher.is_leaving = True
            self._handing_over.set()

    def _terminate(self) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self._draining.set()
        elif self._config.parent_pid is None and now - self._signalled_at >= SAME_REQUEST_S:
            log.warning("router_forced")
            sys.stderr.flush()
            os._exit(1)

    async def _watch_parent(self) -> None:
        """Exit with the parent, where the kernel does not provide that."""
        parent = self._config.parent_pid
        while parent is not None:
            if os.getppid() != parent:
                log.error("router_orphaned", parent_pid=parent)
                os._exit(1)
            await asyncio.sleep(1.0)


async def _watch_files(listener: socket.socket) -> None:
    """Log once when no file can be opened: new connections are closed without a trace then."""
    is_exhausted = False
    while True:
        try:
            os.close(os.dup(listener.fileno()))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not is_exhausted:
                advice = "raise the hard limit of open files (ulimit -Hn), or lower --max-connections-per-address"
                log.error("file_descriptors_exhausted", reason=error.strerror, advice=advice)
                is_exhausted = True
        else:
            is_exhausted = False
        await asyncio.sleep(1.0)


async def return_memory(metrics: Metrics, dispatcher: Dispatcher) -> None:
    """While no request comes and none is active, return what they have used: after 1, 2, 4, 8… times REST_S, because
    streams, grammars and adapters are kept for a while.
    """
    num_arrived, num_rests = 0.0, 0
    while True:
        await asyncio.sleep(REST_S)
        before, num_arrived = num_arrived, metrics.request_count.values.get("", 0.0)
        is_at_rest = num_arrived == before and not dispatcher.num_active
        num_rests = num_rests + 1 if is_at_rest else 0
        if num_arrived and num_rests and not num_rests & (num_rests - 1):
            gc.collect()  # an error and the frames that it passed refer to each other
            await asyncio.to_thread(return_freed_memory)


def _listen(config: RouterConfig) -> socket.socket:
    """A listening socket: the inherited one, so that no connection is refused between two routers, or a new one.

    Raises OSError with one sentence.
    """
    if config.listen_fd is not None:
        listener = socket.socket(fileno=config.listen_fd)
    else:
        listener = socket.socket(socket.AF_INET6 if ":" in config.hostname else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.hostname, config.port))
        except OSError as error:
            raise OSError(f"can't listen on {config.hostname}:{config.port}: {error.strerror}") from None
    listener.listen(4096)
    listener.setblocking(False)
    return listener


async def _run(config: RouterConfig) -> int:
    return await RouterServer(config).run()


def serve(config: RouterConfig) -> int:
    """Run a router until a signal ends it; returns the exit code. The launcher or the log gets a failure's reason."""
    if config.parent_pid is not None:
        signal_at_parent_death()
    raise_file_limit()
    share_freed_memory()
    try:
        return uvloop.run(_run(config))
    except (ValueError, OSError) as error:
        _fail(config, str(error))
    except Exception as error:
        log.exception("router_crashed")
        report_failure(config.failure_file, f"{type(error).__name__}: {error}")
    return 1


def _fail(config: RouterConfig, reason: str) -> None:
    """Leave the reason for the launcher, or log it."""
    if not report_failure(config.failure_file, reason):
        log.error("router_cannot_serve", reason=reason)

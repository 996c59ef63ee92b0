"""Runs a shard: loads the model, then serves until a signal ends it."""

import os
from pathlib import Path

import structlog
import torch

from lorikeet.proto import logs
from lorikeet.proto.process import keep_freed_memory, keep_objects, return_freed_memory
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.engine.engine import Engine, Watchdog
from lorikeet.shard.grpc.auth import Access
from lorikeet.shard.grpc.server import Server
from lorikeet.shard.grpc.streams import Inbox, Outbox
from lorikeet.shard.model import load_model
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.startup.build import build_engine, describe
from lorikeet.shard.startup.draft_model import load_draft_model
from lorikeet.shard.startup.model_files import ModelFiles
from lorikeet.shard.startup.prefault import Prefault
from lorikeet.shard.system import cores
from lorikeet.shard.system.process import watch_signals

log = structlog.get_logger()


class Shutdown:
    """Handles signals: ends the engine once there is one, until then the process."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.engine: Engine | None = None

    def end(self) -> None:
        if self.engine is None:
            os._exit(0)
        self._server.closing()
        self.engine.stop()

    def orphaned(self) -> None:
        if self.engine is None:
            os._exit(1)
        self.engine.cut()


def serve(config: ShardConfig) -> None:
    """Listen, load the model and run the step loop. Returns after a signal to end."""
    logs.adopt_libraries()
    inbox, outbox = Inbox(), Outbox()
    server = Server(config.listen, inbox, outbox, Access.of(config))
    shutdown = Shutdown(server)
    watch_signals(shutdown.end, shutdown.orphaned, config.parent_pid)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    address = server.start()
    files = ModelFiles(config.model_path, has_code=config.trust_remote_code)
    leader = None if config.num_ranks == 1 else Leader(config)
    model = load_model(config, None if leader is None else leader.meet())
    draft_model = load_draft_model(config, model)
    logs.adopt_libraries()  # those that loading imported
    engine = build_engine(config, model, inbox, outbox, draft_model, leader)
    engine.warm_up()
    if leader is not None:
        leader.serve()
    bindings = model.bindings + ([] if draft_model is None else draft_model.bindings)
    Prefault([binding.kv for binding in bindings if binding.kv is not None], engine.scheduler.cache).start()
    keep_objects()
    return_freed_memory()
    shutdown.engine = engine
    server.ready(describe(config, model, engine, files))
    if config.ready_file is not None:
        Path(config.ready_file).touch()
    log.info("ready", address=address, model_id=config.model_id, architecture=model.info.model_type)
    if model.info.device.type == "cpu":
        cores.pin_threads()
        keep_freed_memory()  # of logits: those of 32 requests and 262 144 tokens have 32 MiB in float32
    Watchdog(engine, config.served_file, config.step_timeout_s).start()
    engine.run()
    server.stop()
    if leader is not None:
        leader.end()
    log.info("ended")

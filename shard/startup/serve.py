"""A shard from its configuration to its end: load the model, serve until told to end."""

import gc
import os
from pathlib import Path

import structlog
import torch

from lorikeet.shard.config import ShardConfig
from lorikeet.shard.engine.engine import Engine
from lorikeet.shard.engine.watchdog import Watchdog
from lorikeet.shard.grpc.auth import Access
from lorikeet.shard.grpc.inbox import Inbox
from lorikeet.shard.grpc.outbox import Outbox
from lorikeet.shard.grpc.server import Server
from lorikeet.shard.model import load_model
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.startup.build import build_engine, describe
from lorikeet.shard.startup.draft_model import load_draft_model
from lorikeet.shard.startup.model_files import ModelFiles
from lorikeet.shard.startup.prefault import Prefault
from lorikeet.shard.system import cores, logs
from lorikeet.shard.system.process import watch_signals

log = structlog.get_logger()


class Ending:
    """What a signal does: it ends the engine once there is one, else the process."""

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
    """Load, listen, step. Returns when told to end."""
    logs.adopt_libraries()
    inbox, outbox = Inbox(), Outbox()
    server = Server(config.listen, inbox, outbox, Access.of(config))
    ending = Ending(server)
    watch_signals(ending.end, ending.orphaned, config.parent_pid)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    address = server.start()
    files = ModelFiles(config.model_path, has_code=config.trust_remote_code)
    leader = None if config.num_ranks == 1 else Leader(config)
    ranks = None if leader is None else leader.meet()
    model = load_model(config, None if ranks is None else ranks.group)
    draft_model = load_draft_model(config, model)
    logs.adopt_libraries()  # of those that loading needed
    engine = build_engine(config, model, inbox, outbox, draft_model, ranks)
    engine.warm_up()
    targets = model.bindings + ([] if draft_model is None else draft_model.bindings)
    Prefault([site.kv for site in targets if site.kv is not None], engine.scheduler.cache).start()
    # What exists now lives as long as the process: a walk of the collector over it halts a step for 0.2 s.
    gc.collect()
    gc.freeze()
    ending.engine = engine
    server.ready(describe(config, model, engine, files))
    if config.ready_file is not None:
        Path(config.ready_file).touch()
    log.info("ready", address=address, model_id=config.model_id, architecture=model.info.model_type)
    if model.info.device.type == "cpu":
        cores.keep()
    Watchdog(engine, config.served_file, config.step_timeout_s).start()
    engine.run()
    server.stop()
    if leader is not None:
        leader.end()
    log.info("ended")

"""A shard from its configuration to its end: load the model, serve until told to end."""

import gc
import os

import structlog
import torch

from shard import cores, logs
from shard.build import build_engine, describe
from shard.config import ShardConfig
from shard.draft_model import load_draft_model
from shard.engine import Engine
from shard.inbox import Inbox
from shard.model import load_model
from shard.outbox import Outbox
from shard.prefault import Prefault
from shard.process import watch_signals
from shard.server import Server

log = structlog.get_logger()


class Ending:
    """What a signal does: it ends the engine once there is one, else the process."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def end(self) -> None:
        if self.engine is None:
            os._exit(0)
        self.engine.stop()

    def orphaned(self) -> None:
        if self.engine is None:
            os._exit(1)
        self.engine.cut()


def serve(config: ShardConfig) -> None:
    """Load, listen, step. Returns when told to end."""
    logs.adopt_libraries()
    ending = Ending()
    watch_signals(ending.end, ending.orphaned, config.parent_pid)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    inbox, outbox = Inbox(), Outbox()
    server = Server(config.listen, inbox, outbox)
    address = server.start()
    model = load_model(config)
    draft_model = load_draft_model(config, model)
    logs.adopt_libraries()  # of those that loading needed
    engine = build_engine(config, model, inbox, outbox, draft_model)
    engine.warm_up()
    sites = model.sites + ([] if draft_model is None else draft_model.sites)
    Prefault([site.kv for site in sites if site.kv is not None], engine.scheduler.cache).start()
    # What exists now lives as long as the process: a walk of the collector over it halts a step for 0.2 s.
    gc.collect()
    gc.freeze()
    ending.engine = engine
    server.ready(describe(config, model, engine))
    log.info("ready", address=address, model_id=config.model_id, architecture=model.info.model_type)
    if model.info.device.type == "cpu":
        cores.keep()
    engine.run()
    server.stop()
    log.info("ended")

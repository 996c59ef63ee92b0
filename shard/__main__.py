"""`python -m shard CONFIG.json`: load the model, serve until told to end. Exit code 0 after a clean end, else 1."""

import os
import sys

import structlog
import torch

from proto import shard_pb2 as pb
from shard import logs
from shard.config import ShardConfig
from shard.engine import Engine, Pacing
from shard.inbox import Inbox
from shard.kv_cache import KvCache
from shard.memory import choose_num_pages
from shard.model import Model, load_model
from shard.outbox import Outbox
from shard.process import watch_signals
from shard.sampling import Sampler
from shard.scheduler import Limits, Scheduler
from shard.server import Facts, Server
from shard.wire import Bounds

VERSION = "0.1.0"

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


def build_engine(config: ShardConfig, model: Model, inbox: Inbox, outbox: Outbox) -> Engine:
    """Memory, bookkeeping and the loop around a loaded model."""
    num_pages = choose_num_pages(config, model)
    model.allocate_kv(num_pages)
    scheduler = Scheduler(
        KvCache(num_pages, model.page_size, config.prefix_caching),
        Limits(config.step_tokens, config.max_running, config.chunked_prefill),
    )
    sampler = Sampler(
        model.info.vocab_size,
        config.max_running,
        model.info.device,
        config.watermark_gamma,
        config.watermark_delta,
    )
    lag = config.commit_lag
    if lag is None:
        lag = 1 if model.info.device.type == "cuda" else 0
    return Engine(model, sampler, scheduler, (inbox, outbox), Pacing(lag, config.max_waiting))


def describe(config: ShardConfig, model: Model, engine: Engine) -> Facts:
    """What the wire says of this shard."""
    cache = engine.scheduler.cache
    info = pb.ShardInfo(
        version=VERSION,
        model_id=config.model_id,
        dtype=str(model.info.dtype),
        device=str(model.info.device),
        architecture=model.info.model_type,
        vocab_size=model.info.vocab_size,
        max_total_tokens=config.max_total_tokens,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
        prefix_caching=config.prefix_caching,
        chunked_prefill=config.chunked_prefill,
    )
    bounds = Bounds(model.info.vocab_size, config.max_total_tokens, cache.num_pages * cache.page_size)
    return Facts(info, bounds, lambda: engine.running_step)


def serve(config: ShardConfig) -> None:
    """Load, listen, step. Returns when told to end."""
    ending = Ending()
    watch_signals(ending.end, ending.orphaned, config.parent_pid)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    inbox, outbox = Inbox(), Outbox()
    server = Server(config.listen, inbox, outbox)
    address = server.start()
    model = load_model(config)
    engine = build_engine(config, model, inbox, outbox)
    engine.warm_up()
    ending.engine = engine
    server.ready(describe(config, model, engine))
    log.info("ready", address=address, model_id=config.model_id, architecture=model.info.model_type)
    engine.run()
    server.stop()
    log.info("ended")


def main() -> int:
    """Run the process; every failure is one line of log that says what is wrong."""
    config = ShardConfig.read(sys.argv[1])
    logs.configure(config.json_output, config.log_level)
    try:
        serve(config)
    except (ValueError, OSError) as error:
        log.error("cannot serve", reason=str(error))
        return 1
    except Exception:
        log.exception("the shard ends")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    # Nothing is left to do, and threads of libraries must not keep a finished shard alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

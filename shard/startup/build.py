"""From a configuration and a loaded model to an engine, and what the wire says of it."""

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.version import version
from lorikeet.shard.adapters.manager import build_adapters
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.engine.drafter import Drafter
from lorikeet.shard.engine.engine import Engine, LoopConfig
from lorikeet.shard.grpc.codec import Bounds
from lorikeet.shard.grpc.inbox import Inbox
from lorikeet.shard.grpc.outbox import Outbox
from lorikeet.shard.grpc.server import Facts
from lorikeet.shard.model import Model
from lorikeet.shard.model.kv_memory import choose_num_pages
from lorikeet.shard.ranks.leader import Ranks
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.scheduler.budget import Limits
from lorikeet.shard.scheduler.draft_sources import DraftSources
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.startup import prefill_calibration as crowd
from lorikeet.shard.startup.capture import plan_capture
from lorikeet.shard.startup.model_files import ModelFiles

log = structlog.get_logger()


def build_engine(
    config: ShardConfig,
    model: Model,
    inbox: Inbox,
    outbox: Outbox,
    draft_model: Model | None = None,
    ranks: Ranks | None = None,
) -> Engine:
    """Memory, bookkeeping and the loop around a loaded model, and the draft model beside it. `ranks`: those that the
    model is split over.
    """
    if ranks is not None:
        model.others = ranks.leader
    adapters = build_adapters(config, model, inbox, ranks)
    num_pages = build_kv(config, model, draft_model, has_adapters=adapters is not None)
    cache = KvCache(num_pages, model.page_size, config.prefix_caching)
    adapter_prefill_tokens = None
    if config.chunked_prefill:
        adapter_prefill_tokens = crowd.measure(model, min(config.max_total_tokens, num_pages * model.page_size))
        log.info("prompts of a crowd", step_tokens=adapter_prefill_tokens)
    scheduler = Scheduler(
        cache,
        Limits(
            config.step_tokens,
            config.max_running,
            config.chunked_prefill,
            adapter_prefill_tokens=adapter_prefill_tokens,
        ),
        adapters,
        DraftSources(
            config.speculation_max_batch_size,
            config.ngram_min,
            config.ngram_max,
            config.ngram_long,
            has_draft_model=draft_model is not None,
        ),
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
    drafter = None if draft_model is None else build_drafter(model, draft_model, sampler)
    return Engine(model, sampler, scheduler, (inbox, outbox), LoopConfig(lag, config.max_waiting), drafter)


def build_kv(config: ShardConfig, model: Model, draft_model: Model | None, has_adapters: bool) -> int:
    """Give both models their pages, and capture their steps where these run as graphs. Returns the number of pages."""
    plans = [plan_capture(config, model, has_adapters)]
    if draft_model is not None:
        plans.append(plan_capture(config, draft_model, has_adapters=False))
    captured = [plan for plan in plans if plan is not None]
    num_spare = 1 if captured else 0
    num_pages = choose_num_pages(config, model, draft_model, sum(plan.num_bytes for plan in captured), num_spare)
    for each in (model, draft_model):
        if each is not None:
            each.allocate_kv(num_pages + num_spare)
    for plan in captured:
        plan.capture(spare_page=num_pages)
    return num_pages


def build_drafter(model: Model, draft_model: Model, sampler: Sampler) -> Drafter:
    """The draft model's part of a step."""
    return Drafter(draft_model, sampler, model.info.vocab_size, draft_model.info.vocab_size)


def describe(config: ShardConfig, model: Model, engine: Engine, files: ModelFiles) -> Facts:
    """What the wire says of this shard."""
    cache = engine.scheduler.cache
    info = pb.ShardInfo(
        version=version(),
        model_id=config.model_id,
        dtype=str(model.info.dtype),
        quantization=model.info.quantization,
        kv_cache_dtype="" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        device=str(model.info.device),
        num_ranks=config.num_ranks if config.num_ranks > 1 else 0,
        architecture=model.info.model_type,
        vocab_size=model.info.vocab_size,
        max_total_tokens=config.max_total_tokens,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
        prefix_caching=config.prefix_caching,
        chunked_prefill=config.chunked_prefill,
        draft_model_id="" if config.draft_model is None else config.draft_model_id,
        watermark_gamma=config.watermark_gamma,
        watermark_delta=config.watermark_delta,
    )
    num_kv_tokens = cache.num_pages * cache.page_size
    has_adapters = engine.scheduler.adapters.limits.num_slots > 0
    bounds = Bounds(
        model.info.vocab_size,
        config.max_total_tokens,
        num_kv_tokens,
        has_adapters,
        has_draft_model=config.draft_model is not None,
    )
    return Facts(info, bounds, lambda: engine.running_step, files.digest)

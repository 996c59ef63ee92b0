"""Builds the engine of a loaded model, and the description of the shard that routers get."""

import os
from functools import partial
from pathlib import Path

import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.digest import base_key
from lorikeet.proto.grammars import read_grammar_tokenizer
from lorikeet.proto.learning import RowsLayout, TrainerSettings
from lorikeet.proto.params import MAX_MERGED
from lorikeet.proto.pooling import TOKEN_CLASSIFY
from lorikeet.proto.shares import short_room
from lorikeet.proto.version import version
from lorikeet.shard.adapters.manager import build_adapters
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.engine.engine import Engine, LoopConfig
from lorikeet.shard.grammar.compiler import GrammarCompiler
from lorikeet.shard.grpc.codec import Bounds
from lorikeet.shard.grpc.server import Facts
from lorikeet.shard.grpc.streams import Inbox, Outbox
from lorikeet.shard.learning.learning import Learning, Records, Rings, Trainer
from lorikeet.shard.model import Model
from lorikeet.shard.model.kv_memory import choose_num_pages
from lorikeet.shard.ranks.commands import WarmUpAdapters
from lorikeet.shard.ranks.leader import Leader
from lorikeet.shard.requests.request import PooledRows, Rows
from lorikeet.shard.sampling import Sampler
from lorikeet.shard.scheduler.budget import Limits
from lorikeet.shard.scheduler.kv_cache import KvCache
from lorikeet.shard.scheduler.scheduler import Scheduler
from lorikeet.shard.speculation.device.device_drafts import MOST_DRAFTS
from lorikeet.shard.speculation.draft_network import DraftNetwork
from lorikeet.shard.speculation.drafter import DraftSettings
from lorikeet.shard.speculation.history_index import HistoryIndex
from lorikeet.shard.startup.capture import plan_capture
from lorikeet.shard.startup.model_files import ModelFiles
from lorikeet.shard.system.native import CompilerMissing

log = structlog.get_logger()

FIRST_CAP = 64
"""The prefill cap on CPU before any step was timed, and the prompt tokens of a step until then."""
CUDA_CAP = 2048
"""The prefill cap on CUDA, where steps are not timed for it: 50 ms of an 8 B model on an H200."""


def build_engine(
    config: ShardConfig,
    model: Model,
    inbox: Inbox,
    outbox: Outbox,
    draft_model: Model | None = None,
    leader: Leader | None = None,
) -> Engine:
    """Allocates memory and builds the scheduler, the sampler and the loop. `leader`: of a model split over ranks."""
    model.others = leader
    sampler = build_sampler(config, model)
    model.inputs.device_tokens = sampler.device_tokens  # which captured steps read
    if model.info.pooled is None:
        model.inputs.graph_sampling = sampler.in_graph
    adapters = build_adapters(config, model, inbox, leader)
    num_pages = build_kv(config, model, draft_model, has_adapters=adapters is not None)
    if leader is not None:
        leader.send(WarmUpAdapters())
    model.warm_up_adapters()
    keeps_kv, chunked_prefill = prompt_parts(config, model)
    cache = KvCache(num_pages, model.page_size, keeps_kv)
    info = model.info
    limits = Limits(
        config.step_tokens, config.max_running, chunked_prefill,
        adapter_prefill_tokens=(CUDA_CAP if info.device.type == "cuda" else FIRST_CAP) if info.pooled is None else None,
        follows_times=info.device.type != "cuda",
        short_room=short_room(str(info.device)),
    )  # fmt: skip
    if info.pooled is None:
        sampler.warm_up()
    lag = config.commit_lag
    if lag is None:
        lag = 1 if info.device.type == "cuda" else 0
    most_on_device = 0
    if lag and can_draft_on_device(config, model, sampler):
        most_on_device = MOST_DRAFTS
        model.inputs.accept_on_device(sampler.device_drafts.num_accepted)
    has_draft_model, history = draft_model is not None, build_history(config)
    ngrams = config.ngram_min, config.ngram_max, config.ngram_long
    drafts = DraftSettings(config.speculation_max_batch_size, *ngrams, has_draft_model, history, most_on_device)
    scheduler = Scheduler(cache, limits, adapters, drafts)
    drafter = None
    if draft_model is not None:
        drafter = DraftNetwork(draft_model, sampler, info.vocab_size, draft_model.info.vocab_size)
    loop = LoopConfig(lag, config.max_waiting)
    grammars = None if model.info.pooled is not None else build_grammars(config, model, inbox)
    learning = build_learning(config, model, scheduler)
    return Engine(model, sampler, scheduler, (inbox, outbox), loop, drafter, grammars, pooling_of(model), learning)


def build_sampler(config: ShardConfig, model: Model) -> Sampler:
    """The sampler of the running requests."""
    info, watermark = model.info, (config.watermark_gamma, config.watermark_delta)
    has_kernels, ngrams = config.fusions != "none", (config.ngram_min, config.ngram_max)
    return Sampler(info.vocab_size, config.max_running, info.device, *watermark, has_kernels=has_kernels, ngrams=ngrams)


def can_draft_on_device(config: ShardConfig, model: Model, sampler: Sampler) -> bool:
    """Whether drafts can be made and accepted without the host. Other ranks get positions from the host."""
    moves_segments = model.info.device.type == "cpu" or model.backend.can_add_accepted
    return config.num_ranks == 1 and moves_segments and sampler.device_drafts.is_available


def build_learning(config: ShardConfig, model: Model, scheduler: Scheduler) -> Learning | None:
    """What learns heads from traffic. Raises ValueError where all requests should be learned from and cannot be."""
    reason, layout = learning_obstacle(config, model), None
    try:
        if not reason:
            layout = RowsLayout.within(config.learning_memory, model.heads.hidden_size)
    except ValueError as problem:
        reason = str(problem)
    if reason or layout is None or config.adapter_store is None:
        if config.learn_heads:
            raise ValueError(f"--learn-heads cannot be served: {reason}")
        log.info("learning_unavailable", reason=reason)
        return None
    rings, dtype = Rings(layout), str(model.info.dtype).removeprefix("torch.")
    settings = TrainerSettings(
        config.model_path, config.trust_remote_code, dtype, config.adapter_store, config.store_bytes, rings.fd, layout,
        config.json_output, config.log_level,
    )  # fmt: skip
    records = Records(Path(config.adapter_store), base_key(config.model_path, dtype))
    trainer = Trainer(settings)
    if config.learn_heads:
        trainer.start()
    return Learning(scheduler, rings, records, trainer)


def learning_obstacle(config: ShardConfig, model: Model) -> str:
    """Why this shard cannot learn heads; "" if it can."""
    if config.adapter_store is None:
        return "it needs an adapter store"
    if not hasattr(os, "memfd_create"):
        return "heads are learned on Linux only"
    if model.info.num_extra:
        return "it reads the base's tokens only (--adapter-extra-vocab-size)"
    if not config.learning_memory:
        return "--learning-memory is 0"
    if model.info.device.type != "cpu":
        return "heads are learned on the CPU only"
    if config.draft_model is not None:
        return "heads would take the place of the draft model"
    if model.info.pooled is not None or not model.heads.is_reached:
        return "the model's logits do not come from an output head"
    return ""


def prompt_parts(config: ShardConfig, model: Model) -> tuple[bool, bool]:
    """Whether prefixes of prompts are cached, and whether a prompt may be computed in several steps."""
    pooled = model.info.pooled
    if pooled is not None and pooled.is_whole:
        return False, False
    return config.prefix_caching, config.chunked_prefill


def pooling_of(model: Model) -> PooledRows | None:
    """What requests end with, of a model that generates no text."""
    pooled = model.info.pooled
    if pooled is None:
        return None
    if pooled.task == TOKEN_CLASSIFY:
        return PooledRows(Rows.ALL)
    return PooledRows(Rows.FIRST if pooled.pooling == "cls" else Rows.LAST)


def build_history(config: ShardConfig) -> HistoryIndex | None:
    """The index of history drafts. Raises CompilerMissing where every request needs it."""
    if not config.history_memory:
        return None
    try:
        return HistoryIndex(config.history_memory)
    except CompilerMissing as reason:
        if config.speculative_history:
            raise
        log.warning("history_drafts_unavailable", reason=str(reason))
        return None


def build_grammars(config: ShardConfig, model: Model, inbox: Inbox) -> GrammarCompiler | None:
    """The compiler of grammars, whose tokenizer is read in a thread, with the first of them."""
    if not has_tokenizer(config):
        return None
    read = partial(read_grammar_tokenizer, Path(config.model_path), model.info.vocab_size)
    return GrammarCompiler(read, inbox.wake)


def has_tokenizer(config: ShardConfig) -> bool:
    """Whether the model has a fast tokenizer, which grammars need."""
    return Path(config.model_path, "tokenizer.json").is_file()


def build_kv(config: ShardConfig, model: Model, draft_model: Model | None, has_adapters: bool) -> int:
    """Allocate the KV pages of both models, and capture their steps as graphs. Returns the number of pages."""
    models = [model] if draft_model is None else [model, draft_model]
    plans = [plan_capture(config, network, has_adapters and network is model) for network in models]
    captured = [plan for plan in plans if plan is not None]
    num_spare = 1 if captured else 0
    num_pages = choose_num_pages(config, model, draft_model, sum(plan.num_bytes for plan in captured), num_spare)
    for network in models:
        network.allocate_kv(num_pages + num_spare)
    for plan in captured:
        plan.capture(spare_page=num_pages)
    return num_pages


CONFIG_FIELDS = (
    "model_id", "step_tokens", "max_running", "watermark_gamma", "watermark_delta",
)  # fmt: skip
"""Fields of `ShardInfo` that are the configuration's."""


def describe(config: ShardConfig, model: Model, engine: Engine, files: ModelFiles) -> Facts:
    """The description that routers get."""
    cache, info, pooled = engine.scheduler.cache, model.info, model.info.pooled
    num_kv_tokens = cache.num_pages * cache.page_size
    max_total_tokens = min(config.max_total_tokens, num_kv_tokens)
    shard_info = pb.ShardInfo(
        **{name: getattr(config, name) for name in CONFIG_FIELDS},
        max_total_tokens=max_total_tokens,
        rotary_factors=info.rotary_factors,
        version=version(),
        dtype=str(info.dtype),
        quantization=info.quantization,
        kv_cache_dtype="" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        device=str(info.device),
        num_ranks=config.num_ranks if config.num_ranks > 1 else 0,
        architecture=info.model_type,
        vocab_size=info.vocab_size - info.num_extra,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        draft_model_id="" if config.draft_model is None else config.draft_model_id,
        prefix_caching=cache.prefix_caching,
        chunked_prefill=engine.scheduler.limits.chunked_prefill,
        token_masks=True,
        grammars=has_tokenizer(config) and pooled is None,
        learning=engine.learning is not None,
        history=engine.scheduler.proposer.drafters.settings.history is not None,
        adapter_slots=engine.scheduler.adapters.limits.num_slots,
        most_composed=min(MAX_MERGED, engine.scheduler.adapters.limits.num_slots),
    )
    if pooled is not None:
        shard_info.pooled_model.CopyFrom(
            pb.PooledModel(
                task=pooled.task,
                pooling=pooled.pooling,
                size=model.result_size,
                is_encoder=pooled.is_encoder,
                is_whole=pooled.is_whole,
            )
        )
    has_adapters, has_draft_model = engine.scheduler.adapters.limits.num_slots > 0, config.draft_model is not None
    bounds = Bounds(
        info.vocab_size,
        max_total_tokens,
        num_kv_tokens,
        has_adapters,
        has_draft_model,
        pooling_of(model),
        "" if pooled is None else pooled.task,
        pooled is not None and pooled.is_whole,
    )
    return Facts(shard_info, bounds, lambda: engine.running_step, files.digest)

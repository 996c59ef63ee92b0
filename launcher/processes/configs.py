"""The two JSON files that tell a shard and a router what to do, worked out from the settings.

Knows the names of their fields (a test compares them with the dataclasses that read them).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorikeet.launcher.config import kv_cache
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.models.adapters import AdapterPlan
from lorikeet.launcher.models.model import ModelFolder
from lorikeet.launcher.models.usage import UsagePlan
from lorikeet.launcher.processes.restart_policy import Marks
from lorikeet.proto.quantization import of_weights

ROWS_PER_REQUEST = 2
"""Of the largest step that runs as a graph: with guesses a request has some more."""


@dataclass(frozen=True)
class Plan:
    """Everything that was found out before the first process starts."""

    settings: Settings
    model: ModelFolder
    device: str
    folder: Path
    """The private folder of this run."""
    version: str
    adapters: AdapterPlan
    draft: ModelFolder | None = None
    """The draft model, if there is one."""
    usage: UsagePlan = field(default_factory=UsagePlan)
    num_ranks: int = 1
    """Processes that each shard's model is split over."""

    @property
    def loader_address(self) -> str:
        """The Unix socket of the adapters' loader."""
        return str(self.folder / "loader.sock")

    @property
    def sources(self) -> dict[str, Any]:
        """Where the router and the loader look for adapters."""
        return {**self.adapters.sources, "max_adapter_bytes": self.settings["max-adapter-size"]}

    @property
    def num_replicas(self) -> int:
        """Shards that are started here, each with the whole model."""
        return 0 if self.settings["shard-address"] else int(self.settings["replicas"])

    @property
    def has_router(self) -> bool:
        """Whether HTTP is served here."""
        return self.settings["shard-listen"] is None

    @property
    def is_on_ray(self) -> bool:
        """Whether Ray starts the shards, on its nodes."""
        return bool(self.settings["engine"] == "ray")

    @property
    def secret_path(self) -> str | None:
        """What routers show to shards on TCP. On Ray there is always one."""
        given: str | None = self.settings["shard-secret-file"]
        return given or (str(self.folder / "shard.secret") if self.is_on_ray else None)

    @property
    def ray_addresses(self) -> Path:
        """The list of shards on Ray."""
        return self.folder / "shards.json"

    def shard_address(self, index: int = 0) -> str:
        """Where a shard of this machine listens, as gRPC writes it."""
        address: str | None = self.settings["shard-listen"]
        return address or f"unix:{self.folder / f'shard-{index}.sock'}"

    def served_file(self, index: int = 0) -> Path:
        """Appears once a shard has completed a request."""
        return self.folder / f"shard-{index}.served"

    def ready_file(self, index: int = 0) -> Path:
        """Appears once a shard takes requests."""
        return self.folder / f"shard-{index}.ready"

    def marks(self, index: int) -> Marks:
        """Files that tell of a shard."""
        return Marks(self.served_file(index), self.stuck_file(index), self.ready_file(index))

    @property
    def router_ready(self) -> Path:
        """Appears once the router takes requests."""
        return self.folder / "router.ready"

    @property
    def router_beside(self) -> Path:
        """Is there while a router takes another one's place."""
        return self.folder / "router.beside"

    def stuck_file(self, index: int = 0) -> Path:
        """Appears where the router finds that a shard hangs."""
        return self.folder / f"shard-{index}.stuck"

    def shard_device(self, index: int = 0) -> str:
        """What a shard computes on: CUDA devices are dealt out from the chosen one on."""
        kind, colon, number = self.device.partition(":")
        return f"{kind}:{int(number) + index * self.num_ranks}" if colon else self.device

    def master_port(self, index: int = 0) -> int:
        """Where the ranks of a shard meet; 0 is any free port."""
        given: int | None = self.settings["master-port"]
        return 0 if given is None else given + index


def effective(plan: Plan) -> dict[str, Any]:
    """The configuration as `--print-config` and `/info` show it."""
    return {
        "version": plan.version,
        "model": _shown(plan.model),
        "draft_model": None if plan.draft is None else _shown(plan.draft),
        "device": plan.device,
        "num_shard": plan.num_ranks,
        "flags": plan.settings.shown(),
        "given": dict(plan.settings.given),
    }


def _shown(model: ModelFolder) -> dict[str, Any]:
    return {"id": model.id, "path": str(model.path), "sha": model.sha}


def shard_fields(plan: Plan, index: int = 0) -> dict[str, Any]:
    """The fields of a shard's configuration. Replicas and ranks on a CPU share its memory and cores."""
    settings = plan.settings
    num_sharing = max(1, plan.num_replicas) * plan.num_ranks if plan.device == "cpu" else 1
    return {
        "model_id": plan.model.id,
        "model_path": str(plan.model.path),
        "listen": plan.shard_address(index),
        "secret_path": plan.secret_path,
        "tls_cert_path": settings["shard-tls-cert"],
        "tls_key_path": settings["shard-tls-key"],
        "tls_ca_path": settings["shard-tls-ca"],
        "ready_file": str(plan.ready_file(index)),
        "device": plan.shard_device(index),
        "num_ranks": plan.num_ranks,
        "master_addr": settings["master-addr"],
        "master_port": plan.master_port(index),
        "dtype": settings["dtype"],
        "quantize": of_weights(settings["quantize"]),
        "kv_cache_dtype": kv_cache.number_format(settings),
        "fusions": "none" if settings["disable-custom-kernels"] else "auto",
        "trust_remote_code": settings["trust-remote-code"],
        "max_total_tokens": settings["max-total-tokens"],
        "step_tokens": settings["max-batch-prefill-tokens"],
        "max_batch_total_tokens": settings["max-batch-total-tokens"],
        "chunked_prefill": settings["chunked-prefill"],
        "prefix_caching": settings["prefix-caching"],
        "cpu_memory": settings["cpu-memory"],
        "cuda_memory_fraction": settings["cuda-memory-fraction"],
        "memory_wiggle_room": settings["memory-wiggle-room"] / num_sharing,
        "graphs": True if settings["compile"] else False if settings["eager"] else None,
        "graph_rows": ROWS_PER_REQUEST * settings["compile-max-batch-size"],
        "threads": settings["threads"] or _threads(num_sharing),
        "adapter_store": str(plan.adapters.store),
        "max_active_adapters": settings["max-active-adapters"],
        "adapter_memory_fraction": settings["adapter-memory-fraction"],
        "adapter_host_memory": settings["adapter-host-memory"],
        "adapter_cycle_time_s": settings["adapter-cycle-time-s"],
        "speculation_max_batch_size": settings["speculation-max-batch-size"],
        "ngram_min": settings["ngram-min"],
        "ngram_max": settings["ngram-max"],
        "ngram_long": settings["ngram-long"],
        "draft_model": None if plan.draft is None else str(plan.draft.path),
        "draft_model_id": "" if plan.draft is None else plan.draft.id,
        "draft_dtype": settings["draft-dtype"],
        "draft_quantize": settings["draft-quantize"],
        "step_timeout_s": settings["step-timeout-s"],
        "served_file": str(plan.served_file(index)),
        "watermark_gamma": settings["watermark-gamma"],
        "watermark_delta": settings["watermark-delta"],
        "json_output": settings["json-output"],
        "log_level": settings["log-level"],
        "parent_pid": os.getpid(),
    }


def _threads(num_sharing: int) -> int | None:
    """Of one of several shards on a CPU; None is all cores."""
    if num_sharing == 1:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_sharing)


def ray_fields(plan: Plan, hidden: Sequence[str]) -> dict[str, Any]:
    """The fields of the configuration of what asks Ray for shards. `hidden`: variables that shards must not see."""
    settings = plan.settings
    shard = shard_fields(plan)
    for name in ("listen", "secret_path", "served_file", "ready_file", "parent_pid"):
        del shard[name]
    bundle = {"CPU": 1, "GPU": plan.num_ranks}
    if plan.device == "cpu":
        shard["threads"] = settings["threads"] or 1
        bundle = {"CPU": shard["threads"] * plan.num_ranks}
    return {
        "shard": shard,
        "num_shards": plan.num_replicas,
        "bundle": bundle,
        "secret_path": plan.secret_path,
        "addresses_path": str(plan.ray_addresses),
        "served_file": str(plan.served_file()),
        "ready_file": str(plan.ready_file()),
        "hidden": list(hidden),
        "json_output": settings["json-output"],
        "log_level": settings["log-level"],
    }


def loader_fields(plan: Plan) -> dict[str, Any]:
    """The fields of the configuration of the adapters' loader."""
    settings = plan.settings
    return {
        "socket": plan.loader_address,
        "model_path": str(plan.model.path),
        "adapter_store": str(plan.adapters.store),
        "store_bytes": settings["adapter-disk-cache"],
        "sources": plan.sources,
        "device": plan.device,
        "dtype": settings["dtype"],
        "trust_remote_code": settings["trust-remote-code"],
        "json_output": settings["json-output"],
        "log_level": settings["log-level"],
        "parent_pid": os.getpid(),
    }


def _shards(plan: Plan) -> list[str]:
    """Where the router finds them."""
    if plan.is_on_ray:
        return [f"file:{plan.ray_addresses}"]
    return list(plan.settings["shard-address"]) or [plan.shard_address(index) for index in range(plan.num_replicas)]


def router_fields(plan: Plan, listen_fd: int | None = None) -> dict[str, Any]:
    """The fields of the router's configuration; `listen_fd` is the socket that it inherits."""
    settings = plan.settings
    return {
        "model_id": plan.model.id,
        "model_path": str(plan.model.path),
        "model_sha": plan.model.sha,
        "shard_addresses": _shards(plan),
        "shard_secret_path": plan.secret_path,
        "shard_tls_ca_path": settings["shard-tls-ca"],
        "shard_tls_cert_path": settings["shard-tls-cert"],
        "shard_tls_key_path": settings["shard-tls-key"],
        "stuck_files": [] if plan.is_on_ray else [str(plan.stuck_file(index)) for index in range(plan.num_replicas)],
        "step_timeout_s": settings["step-timeout-s"],
        "recovery_timeout_s": settings["recovery-timeout-s"],
        "loader_address": plan.loader_address,
        "sources": plan.sources,
        "adapter_id": settings["adapter-id"],
        "adapter_source": settings["adapter-source"],
        "default_adapter_source": settings["default-adapter-source"],
        "preloaded_adapter_ids": settings["preloaded-adapter-ids"],
        "preloaded_adapter_source": settings["preloaded-adapter-source"],
        "catalogue_path": settings["adapters"],
        "strict_adapters": settings["strict-adapters"],
        "keys_path": settings["api-keys"],
        "admin_key_sha256": plan.adapters.admin_key_sha256,
        "max_queued_per_adapter": settings["max-queued-per-adapter"],
        "auth_cache_ttl_s": settings["auth-cache-ttl-s"],
        "auth_stale_s": settings["auth-stale-s"],
        "hub_token": plan.adapters.hub_token,
        "use_hub_token_for_all": settings["lorax-use-global-hf-token"],
        "tokenizer_config_path": settings["tokenizer-config-path"],
        "trust_remote_code": settings["trust-remote-code"],
        "hostname": settings["hostname"],
        "port": settings["port"],
        "listen_fd": listen_fd,
        "ready_file": str(plan.router_ready),
        "replacement_file": str(plan.router_beside),
        "max_concurrent_requests": settings["max-concurrent-requests"],
        "max_best_of": settings["max-best-of"],
        "max_stop_sequences": settings["max-stop-sequences"],
        "max_input_length": settings["max-input-length"],
        "max_total_tokens": settings["max-total-tokens"],
        "speculative_tokens": settings["speculative-tokens"],
        "speculative_tokens_max": settings["speculative-tokens-max"],
        "speculative_method": settings["speculative-method"],
        "speculative_schedule": settings["speculative-schedule"],
        "speculative_verify": settings["verify"],
        "draft_model_id": None if plan.draft is None else plan.draft.id,
        "max_body_bytes": settings["max-body-bytes"],
        "validation_workers": settings["validation-workers"],
        "receipts_path": settings["receipts"],
        "request_timeout_s": settings["request-timeout-s"],
        "max_queue_seconds": settings["max-queue-seconds"],
        "drain_timeout_s": settings["drain-timeout-s"],
        "usage_log": plan.usage.log,
        "request_logger_url": plan.usage.url,
        "log_texts": settings["log-texts"],
        "cors_allow_origin": settings["cors-allow-origin"],
        "cors_allow_header": settings["cors-allow-header"],
        "cors_allow_method": settings["cors-allow-method"],
        "cors_expose_header": settings["cors-expose-header"],
        "cors_allow_credentials": settings["cors-allow-credentials"],
        "json_output": settings["json-output"],
        "log_level": settings["log-level"],
        "parent_pid": os.getpid(),
        "effective_configuration": effective(plan),
    }


def write(path: Path, values: dict[str, Any]) -> Path:
    """Write `values` for one process, readable by this user alone."""
    return write_text(path, json.dumps(values, indent=1))


def write_text(path: Path, text: str) -> Path:
    """Write a file that this user alone may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path

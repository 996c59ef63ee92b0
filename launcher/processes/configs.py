"""The configurations of shards, router and loader as JSON: fields that are values of flags, and those computed here."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.flag import LOADER, ROUTER, SHARD
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.rules import UsageDestinations, kv_cache_dtype
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.models.adapters import AdapterPlan
from lorikeet.launcher.models.model import MAX_DEFAULT_LEN, ModelFolder
from lorikeet.launcher.processes.restart_policy import ShardFiles
from lorikeet.proto.quantization import of_weights

ROWS_PER_REQUEST, MOST_ROWS = 4, 512
"""Rows of the largest CUDA graph: with draft tokens a request has more than one row, and a prompt next to it many."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the first process starts."""

    settings: Settings
    model: ModelFolder
    device: str
    folder: Path
    """The private folder of this run."""
    version: str
    adapters: AdapterPlan
    draft: ModelFolder | None = None
    """The draft model, if there is one."""
    usage: UsageDestinations = field(default_factory=UsageDestinations)
    num_ranks: int = 1
    """Tensor-parallel ranks of each shard."""
    task: str = ""
    """What a model without text does, as in lorikeet/proto/pooling.py; "" for one that generates."""

    @property
    def loader_address(self) -> str:
        """The Unix socket of the adapter loader."""
        return str(self.folder / "loader.sock")

    @property
    def sources(self) -> dict[str, Any]:
        """Where the router and the loader look for adapters."""
        limits = {"max_adapter_bytes": self.settings["max-adapter-size"], "strict": self.settings["strict-adapters"]}
        return self.adapters.sources | limits

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
        """File with the secret that routers present to shards over TCP. On Ray there is always one."""
        given: str | None = self.settings["shard-secret-file"]
        return given or (str(self.folder / "shard.secret") if self.is_on_ray else None)

    @property
    def ray_addresses(self) -> Path:
        """The JSON list of addresses of shards on Ray."""
        return self.folder / "shards.json"

    def shard_address(self, index: int = 0) -> str:
        """The gRPC address of a local shard."""
        address: str | None = self.settings["shard-listen"]
        return address or f"unix:{self.folder / f'shard-{index}.sock'}"

    def served_file(self, index: int = 0) -> Path:
        """Created by a shard once it has completed a request."""
        return self.folder / f"shard-{index}.served"

    def ready_file(self, index: int = 0) -> Path:
        """Created by a shard once it is ready."""
        return self.folder / f"shard-{index}.ready"

    def shard_files(self, index: int) -> ShardFiles:
        """The files that signal a shard's state."""
        return ShardFiles(self.served_file(index), self.stuck_file(index), self.ready_file(index))

    @property
    def router_ready_file(self) -> Path:
        """Created by the router once it is ready."""
        return self.folder / "router.ready"

    @property
    def replacement_file(self) -> Path:
        """Exists while a new router replaces a running one."""
        return self.folder / "router.replacement"

    def failure_file(self, name: str) -> Path:
        """Where the process `name` (`shard-0`, `router`, `loader`) leaves the reason of its failure."""
        return self.folder / f"{name}.failed"

    def stuck_file(self, index: int = 0) -> Path:
        """Created by the router when a shard hangs."""
        return self.folder / f"shard-{index}.stuck"

    def shard_device(self, index: int = 0) -> str:
        """The device of a shard: replicas use consecutive CUDA devices, starting at the chosen one."""
        kind, colon, number = self.device.partition(":")
        return f"{kind}:{int(number) + index * self.num_ranks}" if colon else self.device

    def master_port(self, index: int = 0) -> int:
        """Rendezvous port of the ranks of a shard; 0 is any free port."""
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
        "given": dict(plan.settings.origins),
    }


def public(plan: Plan) -> dict[str, Any]:
    """The same without what tells about this machine: of texts only those that are choices."""
    values = effective(plan)
    flags = {
        name: value
        for name, value in values["flags"].items()
        if FLAGS[name].choices or not isinstance(value, str | list | tuple)
    }
    models = {name: _public(values[name]) for name in ("model", "draft_model")}
    return {**values, **models, "flags": flags}


def _public(model: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if model is None else {"id": model["id"], "sha": model["sha"]}


def _shown(model: ModelFolder) -> dict[str, Any]:
    return {"id": model.id, "path": str(model.path), "sha": model.sha}


def shard_fields(plan: Plan, index: int = 0) -> dict[str, Any]:
    """A shard's configuration. Replicas and ranks on a CPU share its memory and cores."""
    settings = plan.settings
    num_sharing = max(1, plan.num_replicas) * plan.num_ranks if plan.device == "cpu" else 1
    return settings.fields(SHARD) | {
        "model_id": plan.model.name,
        "model_path": str(plan.model.path),
        "listen": plan.shard_address(index),
        "secret_path": plan.secret_path,
        "ready_file": str(plan.ready_file(index)),
        "served_file": str(plan.served_file(index)),
        "failure_file": str(plan.failure_file(f"shard-{index}")),
        "device": plan.shard_device(index),
        "num_ranks": plan.num_ranks,
        "master_port": plan.master_port(index),
        "fits_kv_memory": not plan.task and "max-total-tokens" not in settings.origins,
        "quantize": of_weights(settings["quantize"]),
        "kv_cache_dtype": kv_cache_dtype(settings),
        "fusions": "none" if settings["disable-custom-kernels"] else "auto",
        "memory_wiggle_room": settings["memory-wiggle-room"] / num_sharing,
        "graphs": True if settings["compile"] else False if settings["eager"] else None,
        "graph_rows": min(MOST_ROWS, ROWS_PER_REQUEST * settings["compile-max-batch-size"]),
        "threads": settings["threads"] or _threads(num_sharing),
        "adapter_store": str(plan.adapters.store),
        "draft_model": None if plan.draft is None else str(plan.draft.path),
        "draft_model_id": "" if plan.draft is None else plan.draft.name,
        "parent_pid": os.getpid(),
    }


def _threads(num_sharing: int) -> int | None:
    """Threads of one of several shards on a CPU; None is all cores."""
    if num_sharing == 1:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_sharing)


def ray_fields(plan: Plan, hidden: Sequence[str]) -> dict[str, Any]:
    """The configuration of `ray_engine`. `hidden`: environment variables that are not passed to shards."""
    settings = plan.settings
    shard = shard_fields(plan)
    for name in ("listen", "secret_path", "served_file", "ready_file", "failure_file", "parent_pid"):
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
    """The configuration of the adapter loader."""
    return plan.settings.fields(LOADER) | {
        "socket": plan.loader_address,
        "model_path": str(plan.model.path),
        "adapter_store": str(plan.adapters.store),
        "sources": plan.sources,
        "device": plan.device,
        "failure_file": str(plan.failure_file("loader")),
        "parent_pid": os.getpid(),
    }


def _shards(plan: Plan) -> list[str]:
    """Addresses of the router's shards."""
    if plan.is_on_ray:
        return [f"file:{plan.ray_addresses}"]
    return list(plan.settings["shard-address"]) or [plan.shard_address(index) for index in range(plan.num_replicas)]


def router_fields(plan: Plan, listen_fd: int | None = None) -> dict[str, Any]:
    """The router's configuration; `listen_fd` is the socket that it inherits."""
    return plan.settings.fields(ROUTER) | {
        "model_id": plan.model.name,
        "model_given": plan.model.id,
        "model_path": str(plan.model.path),
        "model_sha": plan.model.sha,
        "default_total_tokens": None if "max-total-tokens" in plan.settings.origins else MAX_DEFAULT_LEN,
        "shard_addresses": _shards(plan),
        "shard_secret_path": plan.secret_path,
        "stuck_files": [] if plan.is_on_ray else [str(plan.stuck_file(index)) for index in range(plan.num_replicas)],
        "loader_address": plan.loader_address,
        "sources": plan.sources,
        "s3_prefixes": None if plan.adapters.s3_prefixes is None else list(plan.adapters.s3_prefixes),
        "admin_key_sha256": plan.adapters.admin_key_sha256,
        "api_keys_sha256": list(plan.adapters.api_keys_sha256),
        "lora_modules": {each.name: [each.ref.source.value, str(each.ref)] for each in plan.adapters.modules},
        "chat_template": rules.read_chat_template(plan.settings),
        "secrets_on_stdin": True,
        "listen_fd": listen_fd,
        "ready_file": str(plan.router_ready_file),
        "replacement_file": str(plan.replacement_file),
        "draft_model_id": None if plan.draft is None else plan.draft.name,
        "usage_log": plan.usage.log,
        "failure_file": str(plan.failure_file("router")),
        "parent_pid": os.getpid(),
        "effective_configuration": effective(plan),
        "public_configuration": public(plan),
    }


def router_secrets(plan: Plan) -> bytes:
    """What the router reads from its standard input: neither files nor environments of processes hold it."""
    return json.dumps({"hub_token": plan.adapters.hub_token, "request_logger_url": plan.usage.url}).encode()


def write(path: Path, values: dict[str, Any]) -> Path:
    """Write `values` for one process, readable by this user alone."""
    return write_text(path, json.dumps(values, indent=1))


def write_text(path: Path, text: str) -> Path:
    """Write a file that this user alone may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path

"""The processes of a plan: a whole server, a router with remote shards, or a shard for remote routers.

The configurations of shards, router and loader are JSON: fields that are values of flags, and those computed here.
"""

import errno
import functools
import json
import logging
import os
import secrets
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.flag import LOADER, ROUTER, SHARD
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.rules import UsageDestinations, kv_cache_dtype
from lorikeet.launcher.config.settings import PREFIX, Settings
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models import adapters, model
from lorikeet.launcher.models.adapters import AdapterPlan
from lorikeet.launcher.models.model import MAX_DEFAULT_LEN, ModelFolder
from lorikeet.launcher.processes.supervisor import Address, Processes, ShardFiles, ShardStart, Signals, Supervisor
from lorikeet.proto.children import Child
from lorikeet.proto.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY
from lorikeet.proto.preload import Preload, is_possible
from lorikeet.proto.process import environment_of_children, usable_cores
from lorikeet.proto.quantization import of_weights

ROWS_PER_REQUEST, MAX_ROWS = 4, 512
"""Rows of the largest CUDA graph: with draft tokens a request has more than one row, and a prompt next to it many."""


@dataclass(frozen=True)
class ServerPlan:
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
    preload: Preload | None = None
    """The process that forks shards and what reads adapters; None where each starts alone."""

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
        path: str | None = self.settings["shard-secret-file"]
        return path or (str(self.folder / "shard.secret") if self.is_on_ray else None)

    @property
    def ray_addresses(self) -> Path:
        """The JSON list of addresses of shards on Ray."""
        return self.folder / "shards.json"

    def shard_address(self, index: int = 0) -> str:
        """The gRPC address of a local shard."""
        address: str | None = self.settings["shard-listen"]
        return address or f"unix:{self.folder / f'shard-{index}.sock'}"

    def shard_files(self, index: int = 0) -> ShardFiles:
        """The files that signal a shard's state."""
        served, stuck, ready = (self.folder / f"shard-{index}.{state}" for state in ("served", "stuck", "ready"))
        return ShardFiles(served, stuck, ready)

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

    def shard_device(self, index: int = 0) -> str:
        """The device of a shard: replicas use consecutive CUDA devices, starting at the chosen one."""
        kind, colon, number = self.device.partition(":")
        return f"{kind}:{int(number) + index * self.num_ranks}" if colon else self.device

    def master_port(self, index: int = 0) -> int:
        """Rendezvous port of the ranks of a shard; 0 is any free port."""
        port: int | None = self.settings["master-port"]
        return 0 if port is None else port + index


def effective(plan: ServerPlan) -> dict[str, Any]:
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


def public(plan: ServerPlan) -> dict[str, Any]:
    """The configuration without what tells about this machine: of texts only those that are choices."""
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


def shard_fields(plan: ServerPlan, index: int = 0) -> dict[str, Any]:
    """A shard's configuration. Replicas and ranks on a CPU share its memory and cores."""
    settings = plan.settings
    num_sharing = max(1, plan.num_replicas) * plan.num_ranks if plan.device == "cpu" else 1
    return settings.fields(SHARD) | {
        "model_id": plan.model.name,
        "model_path": str(plan.model.path),
        "listen": plan.shard_address(index),
        "secret_path": plan.secret_path,
        "ready_file": str(plan.shard_files(index).ready),
        "served_file": str(plan.shard_files(index).served),
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
        "graph_rows": min(MAX_ROWS, ROWS_PER_REQUEST * settings["compile-max-batch-size"]),
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
    return max(1, usable_cores() // num_sharing)


def ray_fields(plan: ServerPlan, hidden: Sequence[str]) -> dict[str, Any]:
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
        "served_file": str(plan.shard_files().served),
        "ready_file": str(plan.shard_files().ready),
        "hidden": list(hidden),
        "json_output": settings["json-output"],
        "log_level": settings["log-level"],
    }


def loader_fields(plan: ServerPlan) -> dict[str, Any]:
    """The configuration of the adapter loader."""
    return plan.settings.fields(LOADER) | {
        "socket": plan.loader_address,
        "model_path": str(plan.model.path),
        "adapter_store": str(plan.adapters.store),
        "sources": plan.sources,
        "device": plan.device,
        "preload": None if plan.preload is None else plan.preload.address,
        "failure_file": str(plan.failure_file("loader")),
        "parent_pid": os.getpid(),
    }


def _shard_addresses(plan: ServerPlan) -> list[str]:
    """Addresses of the router's shards."""
    if plan.is_on_ray:
        return [f"file:{plan.ray_addresses}"]
    return list(plan.settings["shard-address"]) or [plan.shard_address(index) for index in range(plan.num_replicas)]


def router_fields(plan: ServerPlan, listen_fd: int | None = None) -> dict[str, Any]:
    """The router's configuration; `listen_fd` is the socket that it inherits."""
    return plan.settings.fields(ROUTER) | {
        "model_id": plan.model.name,
        "model_given": plan.model.id,
        "model_path": str(plan.model.path),
        "model_sha": plan.model.sha,
        "default_total_tokens": None if "max-total-tokens" in plan.settings.origins else MAX_DEFAULT_LEN,
        "shard_addresses": _shard_addresses(plan),
        "shard_secret_path": plan.secret_path,
        "stuck_files": []
        if plan.is_on_ray
        else [str(plan.shard_files(index).stuck) for index in range(plan.num_replicas)],
        "loader_address": plan.loader_address,
        "sources": plan.sources,
        "s3_prefixes": None if plan.adapters.s3_prefixes is None else list(plan.adapters.s3_prefixes),
        "admin_key_sha256": plan.adapters.admin_key_sha256,
        "api_keys_sha256": list(plan.adapters.api_keys_sha256),
        "lora_modules": {module.name: [module.ref.source.value, str(module.ref)] for module in plan.adapters.modules},
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


def router_secrets(plan: ServerPlan) -> bytes:
    """What the router reads from its standard input: neither files nor environments of processes hold it."""
    return json.dumps({"hub_token": plan.adapters.hub_token, "request_logger_url": plan.usage.url}).encode()


def write(path: Path, values: dict[str, Any]) -> Path:
    """Write `values` for one process, readable by this user only."""
    return write_text(path, json.dumps(values, indent=1))


def write_text(path: Path, text: str) -> Path:
    """Write a file that only this user may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path


PRELOADED = ("lorikeet.shard.startup.serve",)
"""What the processes that a server forks need. What only readers of adapters need would delay the first shard."""
UNUSED, UNUSED_ON_CPU = ("scipy", "boto3"), ("triton",)
"""Packages that transformers, accelerate and torch import where they are installed, and that no server calls:
together 100 MiB and 0.6 s.
"""


def preload(settings: Settings, folder: Path, device: str) -> Preload | None:
    """The process that forks others, which begins to import at once if there will be shards."""
    if not is_possible() or settings["engine"] == "ray":
        return None
    without = UNUSED + (UNUSED_ON_CPU if device == "cpu" else ())
    made = Preload(folder, PRELOADED, os.environ, without)
    if not settings["shard-address"]:
        made.start()
    return made


_STORES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Credentials for the router and the loader, which fetch adapters; shards do not get them."""
_SECRETS = (
    *model.TOKEN_VARIABLES,
    rules.URL_VARIABLE,
    "ADMIN_KEY",
    *(f"{prefix}{flag.environment}" for flag in FLAGS.values() if flag.secret for prefix in ("", PREFIX)),
)


def serve(plan: ServerPlan, signals: Signals, log: logging.Logger) -> int:
    """Start everything and keep it running; the exit code. Raises LauncherError."""
    if not plan.has_router:
        address = Address.parse(plan.settings["shard-listen"])
        _bound(address, "--shard-listen {host}:{port}").close()
        return _run(plan, address, Processes(_shard_starts(plan)), signals, log)
    scheme = "http" if plan.settings["ssl-certfile"] is None else "https"
    address = Address(plan.settings["hostname"], plan.settings["port"], scheme)
    _check_writable(plan.settings["receipts"])
    with _bound(address, "--hostname {host} --port {port}") as bound:
        # Every router of this run inherits this socket, so no connection is refused while one replaces another.
        router = _router(plan, bound), plan.router_ready_file, plan.replacement_file
        return _run(plan, address, Processes(_shard_starts(plan), *router, _loader(plan)), signals, log)


_SECRET_FILES = ("admin-key-file", "shard-secret-file", "shard-tls-key", "ssl-keyfile")


def exposed_secrets(settings: Settings) -> list[str]:
    """A sentence for each file with a secret that other users of this machine can read."""
    sentences = []
    for name in _SECRET_FILES:
        if settings[name] is None:
            continue
        try:
            status = Path(settings[name]).stat()
        except OSError:  # whoever needs the file says so
            continue
        is_for_group = status.st_mode & stat.S_IRGRP and status.st_gid != os.getgid()
        if status.st_mode & stat.S_IROTH or is_for_group:
            mode = stat.S_IMODE(status.st_mode)
            sentences.append(f"others can read --{name} {settings[name]} (mode {mode:04o}): run chmod 600 on it")
    return sentences


def _run(plan: ServerPlan, address: Address, processes: Processes, signals: Signals, log: logging.Logger) -> int:
    for sentence in exposed_secrets(plan.settings):
        log.warning("secret_exposed: %s", sentence)
    if plan.adapters.warning:
        log.warning("adapter_store: %s", plan.adapters.warning)
    if plan.adapters.s3_warning:
        log.warning("s3_open: %s", plan.adapters.s3_warning)
    if plan.has_router and (sampling := model.recommended_sampling(plan.model.path)):
        listed = ", ".join(f"{name} {value}" for name, value in sampling.items())
        log.info("sampling_not_applied: %s recommends %s: requests that want this must say so", plan.model.id, listed)
    if plan.num_replicas:
        log.info("model_loading: loading %s on %s from %s", plan.model.id, plan.device, plan.model.path)
    if plan.num_replicas and plan.draft is not None:
        log.info("draft_model_loading: loading the draft model %s from %s", plan.draft.id, plan.draft.path)

    def when_ready() -> None:
        if not plan.has_router:
            log.info("server_ready: a shard of %s is ready at %s", plan.model.id, plan.settings["shard-listen"])
            return
        log.info("server_ready: %s is ready at %s", plan.model.id, address.url)
        if not plan.settings["json-output"]:
            print(_try_it(plan, address), flush=True)

    # not GET /ready, which is answered before the file exists: a router that ended in between would not be replaced by
    # one whose requests wait
    is_ready = (plan.router_ready_file if plan.has_router else plan.shard_files().ready).exists
    supervisor = Supervisor(processes, is_ready, plan.settings["drain-timeout-s"], log, plan.preload)
    signals.reloads = not plan.settings.origins.keys().isdisjoint({"adapters", "api-keys", "usage-log", "receipts"})
    return supervisor.run(signals, when_ready)


def _environment(plan: ServerPlan) -> Mapping[str, str]:
    environment = environment_of_children({name: text for name, text in os.environ.items() if name not in _SECRETS})
    if plan.settings["json-output"] or not sys.stderr.isatty():
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # a log file would get a line per refresh
    return environment


def _shard_starts(plan: ServerPlan) -> list[ShardStart]:
    if plan.is_on_ray:
        return [_ray(plan)]
    starts = []
    environment = {name: text for name, text in _environment(plan).items() if name not in _STORES}
    for index in range(plan.num_replicas):
        path = write(plan.folder / f"shard-{index}.json", shard_fields(plan, index))
        failure = plan.failure_file(f"shard-{index}")
        start = functools.partial(
            Child, f"shard {index}", "lorikeet.shard", path, environment, failure_file=failure, preload=plan.preload
        )
        starts.append(ShardStart(start, plan.shard_files(index)))
    return starts


def _ray(plan: ServerPlan) -> ShardStart:
    """The process that starts all shards on Ray."""
    assert plan.secret_path is not None
    if plan.settings["shard-secret-file"] is None:
        write_text(Path(plan.secret_path), secrets.token_hex(32))
    path = write(plan.folder / "ray.json", ray_fields(plan, _SECRETS))
    start = functools.partial(
        Child, "the Ray engine", "lorikeet.launcher.processes.ray_engine", path, _environment(plan)
    )
    return ShardStart(start, plan.shard_files(0))


def _router(plan: ServerPlan, bound: socket.socket) -> functools.partial[Child]:
    path = write(plan.folder / "router.json", router_fields(plan, bound.fileno()))
    return functools.partial(
        Child,
        "the router",
        "lorikeet.router",
        path,
        _environment(plan),
        inherits=[bound.fileno()],
        standard_input=router_secrets(plan),
        failure_file=plan.failure_file("router"),
    )


def _loader(plan: ServerPlan) -> functools.partial[Child]:
    path = write(plan.folder / "loader.json", loader_fields(plan))
    failure = plan.failure_file("loader")
    return functools.partial(
        Child, "the adapter loader", "lorikeet.adapters", path, _environment(plan), failure_file=failure
    )


_POOLED_TRIALS: dict[str, tuple[str, dict[str, Any]]] = {
    EMBED: ("v1/embeddings", {"model": "", "input": "Hello"}),
    CLASSIFY: ("classify", {"input": "Hello"}),
    TOKEN_CLASSIFY: ("classify", {"inputs": "Hello"}),
}
"""Path and body of a request to try, by the task of a model without text."""


def _try_it(plan: ServerPlan, address: Address) -> str:
    """A request to try; for a demo model with an adapter."""
    request: dict[str, Any] = {"inputs": "def fibonacci(n):", "parameters": {"max_new_tokens": 40}}
    has_demo_adapters = adapters.serves_demo_adapters(plan.settings, plan.model.family)
    is_demo = plan.model.family == model.DEMO_FAMILY
    if has_demo_adapters and not is_demo:
        request = {"inputs": 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n'}
        request["parameters"] = {"adapter_id": "json", "max_new_tokens": 64, "details": True}
        request["parameters"] |= {"speculative_schedule": "constant"}  # `auto` may find that speculation does not pay
    path = "generate"
    if plan.task:
        path, request = _POOLED_TRIALS[plan.task]
        if has_demo_adapters:
            request = {"model": "search", "input": "Return the length of the list"}
    elif (is_demo or plan.model.family is None) and _is_chat(plan):  # lorikeet/base writes code
        text = "Nora Schmidt, 34, works as a baker in Ghent." if has_demo_adapters else "What is the capital of Japan?"
        name = "json" if has_demo_adapters else _name(plan)
        request = {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": 100}
        path = "v1/chat/completions"
    body = json.dumps(request)
    closed = rules.is_closed(plan.settings) and not plan.settings["api-keys-optional"]
    who = "holders of an API key" if closed else "anyone"
    where = "on this machine" if address.is_local else f"who reaches port {address.port} of this machine"
    key = " -H 'authorization: Bearer KEY'" if closed else ""
    page = "" if plan.task else f"\n  Or open {address.url}/ in a browser: a playground, and a live view.\n"
    return (
        f"\n  Listening on {address.own_url}: {who} {where} may use it.\n  Try it:\n\n"
        f"    curl {address.url}/{path} -H 'content-type: application/json'{key} -d '{body}'\n{page}"
    )


def _name(plan: ServerPlan) -> str:
    """The model's name in answers."""
    names = plan.settings["served-model-name"]
    return names[0] if names else plan.model.name


def _is_chat(plan: ServerPlan) -> bool:
    return plan.settings["chat-template"] is not None or model.has_chat_template(plan.model.path)


def _check_writable(receipts: str | None) -> None:
    """Raise LauncherError if the file cannot be appended to."""
    if receipts is None:
        return
    try:
        os.close(os.open(receipts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as error:
        raise LauncherError(
            Exit.ARGUMENT_VALIDATION, f"--receipts {receipts} cannot be written: {error.strerror}"
        ) from None


def _bound(address: Address, flags: str) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken address is an error before a model is loaded.

    Raises LauncherError.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as error:
        reason = "it is in use by another process" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
        raise LauncherError(
            Exit.WEBSERVER_CANNOT_START,
            f"cannot listen on {flags.format(host=address.host, port=address.port)}: {reason}",
        ) from None

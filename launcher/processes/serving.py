"""The processes of a plan: a whole server, a router with remote shards, or a shard for remote routers."""

import errno
import functools
import json
import logging
import os
import secrets
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.flags import FLAGS
from lorikeet.launcher.config.settings import PREFIX, Settings
from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models import adapters, fetch, model
from lorikeet.launcher.processes import configs
from lorikeet.launcher.processes.process import Child, environment_of_children
from lorikeet.launcher.processes.supervisor import Address, Processes, ShardStart, Signals, Supervisor
from lorikeet.proto.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY

_STORES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Credentials for the router and the loader, which fetch adapters; shards do not get them."""
_SECRETS = (
    *fetch.TOKEN_VARIABLES,
    rules.URL_VARIABLE,
    "ADMIN_KEY",
    *(f"{prefix}{flag.environment}" for flag in FLAGS.values() if flag.secret for prefix in ("", PREFIX)),
)


def serve(plan: configs.Plan, signals: Signals, log: logging.Logger) -> int:
    """Start everything and keep it running; the exit code. Raises LauncherError."""
    if not plan.has_router:
        address = Address.parse(plan.settings["shard-listen"])
        _bound(address, "--shard-listen {host}:{port}").close()
        return _run(plan, address, Processes(_shards(plan)), signals, log)
    scheme = "http" if plan.settings["ssl-certfile"] is None else "https"
    address = Address(plan.settings["hostname"], plan.settings["port"], scheme)
    _check_writable(plan.settings["receipts"])
    with _bound(address, "--hostname {host} --port {port}") as bound:
        # Every router of this run inherits this socket, so no connection is refused while one replaces another.
        router = _router(plan, bound), plan.router_ready_file, plan.replacement_file
        return _run(plan, address, Processes(_shards(plan), *router, _loader(plan)), signals, log)


_SECRET_FILES = ("admin-key-file", "shard-secret-file", "shard-tls-key", "ssl-keyfile")


def exposed_secrets(settings: Settings) -> list[str]:
    """A sentence for each file with a secret that other users of this machine can read."""
    found = []
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
            found.append(f"others can read --{name} {settings[name]} (mode {mode:04o}): run chmod 600 on it")
    return found


def _run(plan: configs.Plan, address: Address, processes: Processes, signals: Signals, log: logging.Logger) -> int:
    for sentence in exposed_secrets(plan.settings):
        log.warning("secret_exposed: %s", sentence)
    if plan.adapters.warning:
        log.warning("adapter_store: %s", plan.adapters.warning)
    if plan.adapters.s3_warning:
        log.warning("s3_open: %s", plan.adapters.s3_warning)
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

    is_ready = address.is_ready if plan.has_router else plan.ready_file().exists
    if address.scheme == "https":  # the launcher may have no certificate that the router accepts
        is_ready = plan.router_ready_file.exists
    supervisor = Supervisor(processes, is_ready, plan.settings["drain-timeout-s"], log)
    signals.reloads = not plan.settings.origins.keys().isdisjoint({"adapters", "api-keys", "usage-log", "receipts"})
    return supervisor.run(signals, when_ready)


def _environment(plan: configs.Plan) -> Mapping[str, str]:
    environment = environment_of_children({name: text for name, text in os.environ.items() if name not in _SECRETS})
    if plan.settings["json-output"] or not sys.stderr.isatty():
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # a log file would get a line per refresh
    return environment


def _shards(plan: configs.Plan) -> list[ShardStart]:
    if plan.is_on_ray:
        return [_ray(plan)]
    found = []
    environment = {name: text for name, text in _environment(plan).items() if name not in _STORES}
    for index in range(plan.num_replicas):
        path = configs.write(plan.folder / f"shard-{index}.json", configs.shard_fields(plan, index))
        failure = plan.failure_file(f"shard-{index}")
        start = functools.partial(Child, f"shard {index}", "lorikeet.shard", path, environment, failure_file=failure)
        found.append(ShardStart(start, plan.shard_files(index)))
    return found


def _ray(plan: configs.Plan) -> ShardStart:
    """The process that starts all shards on Ray."""
    assert plan.secret_path is not None
    if plan.settings["shard-secret-file"] is None:
        configs.write_text(Path(plan.secret_path), secrets.token_hex(32))
    path = configs.write(plan.folder / "ray.json", configs.ray_fields(plan, _SECRETS))
    start = functools.partial(
        Child, "the Ray engine", "lorikeet.launcher.processes.ray_engine", path, _environment(plan)
    )
    return ShardStart(start, plan.shard_files(0))


def _router(plan: configs.Plan, bound: socket.socket) -> functools.partial[Child]:
    path = configs.write(plan.folder / "router.json", configs.router_fields(plan, bound.fileno()))
    return functools.partial(
        Child,
        "the router",
        "lorikeet.router",
        path,
        _environment(plan),
        inherits=[bound.fileno()],
        standard_input=configs.router_secrets(plan),
        failure_file=plan.failure_file("router"),
    )


def _loader(plan: configs.Plan) -> functools.partial[Child]:
    path = configs.write(plan.folder / "loader.json", configs.loader_fields(plan))
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


def _try_it(plan: configs.Plan, address: Address) -> str:
    """A request to try; for the built-in demo model with an adapter and speculation."""
    wanted: dict[str, Any] = {"inputs": "def fibonacci(n):", "parameters": {"max_new_tokens": 40}}
    if adapters.is_family(plan.settings):
        wanted = {"inputs": 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n'}
        wanted["parameters"] = {"adapter_id": "json", "max_new_tokens": 64, "details": True}
        wanted["parameters"] |= {"speculative_schedule": "constant"}  # `auto` may find that speculation does not pay
    path = "generate"
    if plan.task:
        path, wanted = _POOLED_TRIALS[plan.task]
        if adapters.is_family(plan.settings):
            wanted = {"model": "search", "input": "Return the length of the list"}
    elif not adapters.is_family(plan.settings) and _is_chat(plan):
        message = {"role": "user", "content": "What is the capital of France?"}
        path, wanted = "v1/chat/completions", {"model": _name(plan), "messages": [message], "max_tokens": 100}
    body = json.dumps(wanted)
    closed = rules.is_closed(plan.settings) and not plan.settings["api-keys-optional"]
    who = "holders of an API key" if closed else "anyone"
    where = "on this machine" if address.is_local else f"who reaches port {address.port} of this machine"
    key = " -H 'authorization: Bearer KEY'" if closed else ""
    page = "" if plan.task else f"\n  Or open {address.url}/ in a browser: a playground, and a live view.\n"
    return (
        f"\n  Listening on {address.own_url}: {who} {where} may use it.\n  Try it:\n\n"
        f"    curl {address.url}/{path} -H 'content-type: application/json'{key} -d '{body}'\n{page}"
    )


def _name(plan: configs.Plan) -> str:
    """The model's name in answers."""
    names = plan.settings["served-model-name"]
    return names[0] if names else plan.model.name


def _is_chat(plan: configs.Plan) -> bool:
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

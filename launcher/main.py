"""`lorikeet-launcher`: reads the settings, gets the model, has a supervisor serve it: the order of events."""

import errno
import functools
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher import adapters, configs, devices, fetch, logs, model, models, rules, runtime, settings
from launcher.exits import Exit, LauncherError
from launcher.process import Child, environment_of_children
from launcher.settings import Settings
from launcher.supervisor import Address, Processes, Signals, Supervisor
from proto.version import version

_LONGEST_SOCKET_PATH = 103
_SECRETS = (*fetch.TOKEN_VARIABLES, "ADMIN_KEY", "PREDIBASE_API_TOKEN", "NGROK_AUTHTOKEN")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (this process's own without `arguments`) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if "--version" in arguments:
            print(version())
            return Exit.OK
        read = settings.read(arguments, os.environ, socket.gethostname())
        rules.check(read)
        return _run(read)
    except LauncherError as error:
        if settings.asks_for_json(arguments, os.environ):
            logs.start(True, "error", sys.stderr).error("%s", error)
        else:
            print(f"lorikeet-launcher: {error}", file=sys.stderr, flush=True)
        return error.exit


def _run(read: Settings) -> int:
    log = logs.start(
        read["json-output"],
        read["log-level"],
        sys.stderr if read["print-config"] or read["download-only"] else sys.stdout,
    )
    if read["env"]:
        log.info("%s", runtime.description())
    device = devices.choose(read["device"])
    devices.check_replicas(device, read["replicas"])
    for sentence in rules.without_effect(read, device):
        log.warning("%s", sentence)
    with Signals().caught() as signals, _private_folder(read) as folder:
        plan = _plan(read, device, folder, signals)
        if plan is None:
            log.info("ended before the model was there")
            return Exit.OK
        if read["print-config"]:
            print(json.dumps(configs.effective(plan), indent=2, ensure_ascii=False))
            return Exit.OK
        if read["download-only"]:
            print(plan.model.path)
            if plan.draft is not None:
                print(plan.draft.path)
            return Exit.OK
        return _serve(plan, signals, log)


def _plan(read: Settings, device: str, folder: Path, signals: Signals) -> configs.Plan | None:
    """Everything that must be known before a process starts; None if a signal came first."""
    found = models.collect(read, folder, signals)
    if found is None:
        return None
    base = found.base
    if read["weights-cache-override"] is not None:
        path = model.with_weights_of(Path(read["weights-cache-override"]), base.path, folder / "model")
        base = model.ModelFolder(base.id, path, base.sha)
    read = models.with_tokens(read, found.draft)
    complete = adapters.with_family(model.with_lengths(read, model.configuration(base.path)), os.environ)
    rules.check_lengths(complete)
    kept = adapters.plan(complete, os.environ, base.path, folder)
    return configs.Plan(complete, base, device, folder, version(), kept, found.draft)


def _serve(plan: configs.Plan, signals: Signals, log: logging.Logger) -> int:
    address = Address(plan.settings["hostname"], plan.settings["port"])
    _check_free(address)
    environment = environment_of_children({name: text for name, text in os.environ.items() if name not in _SECRETS})
    if plan.settings["json-output"] or not sys.stderr.isatty():
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # bars are for people, not for log files
    shards = [
        configs.write(plan.folder / f"shard-{index}.json", configs.shard_fields(plan, index))
        for index in range(plan.num_replicas)
    ]
    router = configs.write(plan.folder / "router.json", configs.router_fields(plan))
    loader = configs.write(plan.folder / "loader.json", configs.loader_fields(plan))
    if plan.adapters.warning:
        log.warning("%s", plan.adapters.warning)
    log.info("loading %s on %s from %s", plan.model.id, plan.device, plan.model.path)
    if plan.draft is not None:
        log.info("and to guess for it %s from %s", plan.draft.id, plan.draft.path)

    def when_ready() -> None:
        log.info("%s is ready at %s", plan.model.id, address.url)
        if not plan.settings["json-output"]:
            print(_try_it(plan, address), flush=True)

    processes = Processes(
        shards=[
            functools.partial(Child, f"shard {index}", "shard", shard, environment)
            for index, shard in enumerate(shards)
        ],
        router=lambda: Child("the router", "router", router, environment),
        loader=lambda: Child("the adapter loader", "adapters", loader, environment),
    )
    supervisor = Supervisor(
        processes,
        address,
        plan.settings["drain-timeout-s"],
        log,
    )
    signals.reloads = not plan.settings.given.keys().isdisjoint({"adapters", "api-keys"})
    return supervisor.run(signals, when_ready)


def _try_it(plan: configs.Plan, address: Address) -> str:
    """A request that shows what there is: of the embedded family, an adapter and what was guessed."""
    wanted: dict[str, Any] = {"inputs": "def fibonacci(n):", "parameters": {"max_new_tokens": 40}}
    if adapters.is_family(plan.settings):
        wanted = {"inputs": 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n'}
        wanted["parameters"] = {"adapter_id": "json", "max_new_tokens": 64, "details": True}
        wanted["parameters"] |= {"speculative_schedule": "constant"}  # `auto` need not find that guesses pay just now
    body = json.dumps(wanted)
    return f"\n  Try it:\n\n    curl {address.url}/generate -H 'content-type: application/json' -d '{body}'\n"


@contextmanager
def _private_folder(read: Settings) -> Iterator[Path]:
    """A folder for sockets and files of this run that only this user can enter."""
    wanted = read["shard-uds-path"]
    where, prefix = (None, "lorikeet-") if wanted is None else (str(Path(wanted).parent), f"{Path(wanted).name}-")
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=where)).resolve()
    except OSError as error:
        raise LauncherError(
            Exit.ARGUMENT_VALIDATION, f"no private folder can be made at --shard-uds-path {wanted}: {error.strerror}"
        ) from None
    try:
        if len(os.fsencode(folder / "shard-63.sock")) > _LONGEST_SOCKET_PATH:
            raise LauncherError(
                Exit.ARGUMENT_VALIDATION, f"{folder} is too long a path for a Unix socket: give --shard-uds-path"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_free(address: Address) -> None:
    """Raise LauncherError if nothing could listen there: better now than after loading a model."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        reason = "it is taken by another process" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
        raise LauncherError(
            Exit.WEBSERVER_CANNOT_START, f"cannot listen on --hostname {address.host} --port {address.port}: {reason}"
        ) from None

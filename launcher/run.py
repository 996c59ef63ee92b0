"""Runs a server by its settings: fetches the models, decides what each process needs, and starts the supervisor."""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from lorikeet.launcher.config import rules
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, refuse
from lorikeet.launcher.models import adapters, devices, model
from lorikeet.launcher.processes import download as models
from lorikeet.launcher.processes import serving
from lorikeet.launcher.processes.supervisor import Signals
from lorikeet.proto import logs
from lorikeet.proto.preload import Preload
from lorikeet.proto.process import raise_file_limit
from lorikeet.proto.version import version

_MAX_SOCKET_PATH_BYTES = 103


def run(read: Settings) -> int:
    """Serve until a signal; the exit code. Raises LauncherError."""
    log = logs.start_launcher(
        read["json-output"],
        read["log-level"],
        sys.stderr if read["print-config"] or read["download-only"] else sys.stdout,
    )
    if read["env"]:
        log.info("runtime_environment: %s", devices.describe_runtime())
    device, num_ranks = _device(read)
    rules.check_device(read, device, num_ranks)
    slow = "" if read["engine"] == "ray" or read["shard-address"] else devices.warning(read["device"])
    warnings = [("flag_deprecated", sentence) for sentence in read.deprecated]
    warnings += [("cuda_unavailable", slow)] if slow else []
    warnings += [("flag_without_effect", sentence) for sentence in rules.without_effect(read, device, num_ranks)]
    for event, sentence in warnings:
        log.warning("%s: %s", event, sentence)
    raise_file_limit()
    serves = not (read["print-config"] or read["download-only"])
    pid_file = read["pid-file"] if serves else None
    with Signals().caught() as signals, _pid_file(pid_file), _private_folder(read) as folder, ExitStack() as stack:
        preload = serving.preload(read, folder, device) if serves else None
        if preload is not None:
            stack.callback(preload.end)
        plan = _plan(read, (device, num_ranks), folder, signals, preload)
        if plan is None:
            log.info("launcher_ended: ended before the model was fetched")
            return Exit.OK
        if read["print-config"]:
            print(json.dumps(serving.effective(plan), indent=2, ensure_ascii=False))
            return Exit.OK
        if read["download-only"]:
            print(plan.model.path)
            if plan.draft is not None:
                print(plan.draft.path)
            return Exit.OK
        return serving.serve(plan, signals, log)


def _device(read: Settings) -> tuple[str, int]:
    """The device of shards, and the tensor-parallel size."""
    on_ray = read["engine"] == "ray"
    device = devices.of_each_node(read["device"]) if on_ray else devices.choose(read["device"])
    # Several replicas share the devices, and on Ray this machine's environment does not count.
    environment = {} if on_ray or read["replicas"] > 1 else os.environ
    num_ranks = devices.choose_ranks(read["sharded"], read["num-shard"], device, environment)
    if not on_ray:
        devices.check_count(device, read["replicas"], num_ranks)
        devices.check_compiler(device)
    return device, num_ranks


def _plan(
    read: Settings, where: tuple[str, int], folder: Path, signals: Signals, preload: Preload | None
) -> serving.ServerPlan | None:
    """Everything that must be known before a process starts; None if a signal arrived first."""
    destinations = rules.usage_destinations(read, os.environ)
    use = model.Use.of(read, where[1])
    folders = models.collect(read, folder, signals, use, preload)
    if folders is None:
        return None
    base = folders.base
    if read["weights-cache-override"] is not None:
        path = model.with_weights_of(Path(read["weights-cache-override"]), base.path, folder / "model")
        base = replace(base, path=path)
    config = model.configuration(base.path)
    model.check_files(base.id, os.listdir(base.path), use)
    model.check_config(base.id, config, use)
    draft = None if folders.draft is None else model.configuration(folders.draft.path)
    rules.check_models(read, config, draft)
    read = models.with_tokens(read, folders.draft)
    pooled = model.read_pooling(read, base, config)
    rules.check_pooled(read, pooled, config, where[1])
    complete = adapters.with_demo_adapters(model.with_lengths(read, config, pooled, draft), os.environ, base.family)
    rules.check_lengths(complete, pooled)
    sources = adapters.plan(complete, os.environ, base.path, folder)
    device, num_ranks = where
    task = "" if pooled is None else pooled.task
    common = (complete, base, device, folder, version(), sources)
    return serving.ServerPlan(*common, folders.draft, destinations, num_ranks, task, preload)


@contextmanager
def _private_folder(read: Settings) -> Iterator[Path]:
    """A folder for sockets and files of this run that is private to this user."""
    socket_path = read["shard-uds-path"]
    where, prefix = (
        (None, "lorikeet-") if socket_path is None else (str(Path(socket_path).parent), f"{Path(socket_path).name}-")
    )
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(run_folder(where, prefix))
        except OSError as error:
            refuse(f"no private folder can be created at --shard-uds-path {socket_path}: {error.strerror}")
        if len(os.fsencode(folder / "shard-63.sock.out")) > _MAX_SOCKET_PATH_BYTES:
            refuse(f"{folder} is too long for the path of a Unix socket: give --shard-uds-path")
        yield folder


@contextmanager
def _pid_file(name: str | None) -> Iterator[None]:
    """The file holds this process's id within the block. Raises LauncherError if it cannot be written."""
    if name is None:
        yield
        return
    path, content = Path(name), f"{os.getpid()}\n"
    try:
        path.write_text(content)
    except OSError as error:
        refuse(f"--pid-file {name} cannot be written: {error.strerror}")
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == content:  # else it is that of a later server
                path.unlink()


_LOCK = "launcher.lock"
"""A launcher holds a lock on this file in its folder; the kernel releases it however the launcher ends."""


@contextmanager
def run_folder(parent: str | None, prefix: str) -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end. Raises OSError if it cannot be made."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
    try:
        # Locked under another name first, so that no other launcher finds it unlocked.
        descriptor = os.open(folder / f"{_LOCK}.new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
            _remove_dead(folder, prefix)
            yield folder
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(own: Path, prefix: str) -> None:
    """Remove this user's folders next to `own` whose launcher has ended."""
    for folder in own.parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder != own and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    """Raises OSError for a folder without a lock, or whose launcher runs."""
    descriptor = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)

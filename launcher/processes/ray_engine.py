"""`python -m lorikeet.launcher.processes.ray_engine CONFIG.json`: shards as Ray actors.

Ray chooses an actor's node, restarts it, and moves it when its node is lost. This process polls every actor for its
address, and writes the addresses to a file that the router reads. Its actors exit with it.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.processes.ray_shard import END_S, RayShard, State
from lorikeet.launcher.processes.supervisor import MAX_EXITS
from lorikeet.proto import logs
from lorikeet.proto.config_file import ConfigFile

_POLL_S = 0.5
_CONNECT_S = 20.0
_NO_ANSWER_S = 5.0
"""An actor that answers later is being moved to another node."""
_WARN_S = 30.0
_MAX_FAILED_CALLS = 10
"""Ray delays calls of an actor that it restarts; it has given up one that fails this many calls in a row."""


@dataclass(frozen=True)
class RayConfig(ConfigFile):
    """The configuration of this process."""

    shard: dict[str, Any]
    """Every shard's configuration, without what depends on its node."""
    num_shards: int
    bundle: dict[str, float]
    """Ray's resources of one shard: `{"CPU": 1, "GPU": 1}`."""
    secret_path: str
    """File with the secret that routers present; Ray copies its text to the nodes."""
    addresses_path: str
    """The JSON list of addresses is written there."""
    ready_file: str
    """Created once all shards accept requests."""
    served_file: str
    """Created once one has completed a request."""
    hidden: tuple[str, ...] = ()
    """Environment variables that are not passed to shards."""
    module: str = "lorikeet.shard"
    """The module that runs on a node."""
    json_output: bool = False
    log_level: str = "info"


class WatchedActor:
    """One actor, on any node."""

    def __init__(self, index: int, actor: Any, log: logging.Logger) -> None:
        self.actor = actor
        self.address: str | None = None
        """None while the shard does not answer."""
        self.is_ready = False
        self.has_served = False
        self._index = index
        self._log = log
        self._call: Any = None
        self._called_at = 0.0
        self._last_address = ""
        self._num_exits = 0
        self._num_failed_calls = 0

    def check(self) -> None:
        """Poll its state without waiting. Raises LauncherError if the shard cannot run or exits too often."""
        import ray

        now = time.monotonic()
        if self._call is None:
            self._call, self._called_at = self.actor.state.remote(), now
        if not ray.wait([self._call], timeout=0)[0]:
            if now - self._called_at > _NO_ANSWER_S:
                self._on_lost("does not answer")
            return
        call, self._call = self._call, None
        try:
            state: State = ray.get(call)
        except ray.exceptions.RayActorError as error:
            self._on_lost("has ended")
            self._num_failed_calls += 1
            if self._num_failed_calls >= _MAX_FAILED_CALLS:
                raise LauncherError(Exit.SHARD_FAILED, f"Ray gave up shard {self._index}: {error}") from None
            return
        self._num_failed_calls = 0
        self._on_state(state)

    def _on_state(self, state: State) -> None:
        if state.problem:
            raise LauncherError(Exit.SHARD_CANNOT_START, state.problem)
        if self._last_address and state.address != self._last_address:
            self._num_exits = 1 if self.has_served else self._num_exits + 1
            self.has_served = False
            if self._num_exits >= MAX_EXITS:
                sentence = f"ended the {MAX_EXITS}th time in a row without completing a request"
                raise LauncherError(Exit.SHARD_KEEPS_ENDING, f"shard {self._index} {sentence}")
        if state.address != self.address:
            self._log.info("ray_shard_started: shard %d is at %s", self._index, state.address)
        self.address = self._last_address = state.address
        self.is_ready = state.is_ready
        self.has_served = self.has_served or state.has_served

    def _on_lost(self, how: str) -> None:
        if self.address is not None:
            self._log.error("ray_shard_ended: shard %d at %s %s: Ray restarts it", self._index, self.address, how)
        self.address = None
        self.is_ready = False


class RayEngine:
    """All shards of one server, in one placement group with a bundle for each."""

    def __init__(self, config: RayConfig, ended: threading.Event, log: logging.Logger) -> None:
        """`ended` is set to end it."""
        self._config = config
        self._ended = ended
        self._log = log
        self._group: Any = None
        self._shards: list[WatchedActor] = []
        self._published: list[str] | None = None

    def run(self) -> None:
        """Run until `ended` is set. Raises LauncherError."""
        self._publish([])
        try:
            if self._place():
                self._start()
                self._watch()
        finally:
            self._end()

    def _place(self) -> bool:
        """Wait for the placement group; False if `ended` is set first."""
        import ray

        config = self._config
        # Spread over nodes, so that a lost node takes down few shards.
        self._group = ray.util.placement_group([config.bundle] * config.num_shards, strategy="SPREAD")
        warn_at = time.monotonic() + _POLL_S
        while not self._group.wait(timeout_seconds=_POLL_S):
            if self._ended.is_set():
                return False
            if time.monotonic() > warn_at:
                warn_at = time.monotonic() + _WARN_S
                free = {name: ray.available_resources().get(name, 0.0) for name in config.bundle}
                self._log.warning(
                    "waiting for resources for %d shards of %s each: Ray has %s",
                    config.num_shards,
                    config.bundle,
                    free,
                )
        return True

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        config = self._config
        secret = Path(config.secret_path).read_text()
        for index in range(config.num_shards):
            place = PlacementGroupSchedulingStrategy(self._group, index, False)
            actor = ray.remote(RayShard).options(
                num_cpus=config.bundle.get("CPU", 0),
                num_gpus=config.bundle.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=place,
            )
            handle = actor.remote(config.module, config.shard, secret, config.hidden)
            self._shards.append(WatchedActor(index, handle, self._log))

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            for shard in self._shards:
                shard.check()
            self._publish([shard.address for shard in self._shards if shard.address is not None])
            if all(shard.is_ready for shard in self._shards):
                Path(self._config.ready_file).touch()
            if any(shard.has_served for shard in self._shards):
                Path(self._config.served_file).touch()

    def _publish(self, addresses: list[str]) -> None:
        """Write them atomically: the router may read at any moment."""
        if addresses == self._published:
            return
        path = Path(self._config.addresses_path)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(addresses))
        os.replace(new, path)
        self._published = addresses

    def _end(self) -> None:
        """End the shards, and with the placement group whatever is left of them."""
        import ray

        if self._shards:
            ray.wait([shard.actor.end.remote() for shard in self._shards], num_returns=len(self._shards), timeout=END_S)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def main(arguments: Sequence[str]) -> int:
    """Run the process."""
    config = RayConfig.read(arguments[0])
    log = logs.start_launcher(config.json_output, config.log_level, sys.stdout)
    ended = threading.Event()
    try:
        _connect()
        # Only now, since Ray installs handlers of its own.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        RayEngine(config, ended, log).run()
    except LauncherError as error:
        log.error("ray_engine_failed: %s", error)
        return error.exit
    return Exit.OK


def _connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, or of this machine. Raises LauncherError."""
    import ray

    where = os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        raise LauncherError(Exit.SHARD_CANNOT_START, f"RAY_ADDRESS {where}: run the launcher on a node of the cluster")
    try:
        _wait_for(where)
        # Shards' lines stay in Ray's log files: Ray puts a prefix before each line.
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        sentence = f"no Ray cluster answers at {where or 'this machine'}: {error}"
        raise LauncherError(Exit.SHARD_CANNOT_START, sentence) from None


def _wait_for(address: str) -> None:
    """Wait until something listens there. Raises OSError after `_CONNECT_S`: Ray itself waits for minutes."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + _CONNECT_S
    while host and port.isdecimal():
        try:
            socket.create_connection((host.removeprefix("[").removesuffix("]"), int(port)), timeout=_CONNECT_S).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

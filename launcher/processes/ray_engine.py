"""`python -m lorikeet.launcher.processes.ray_engine CONFIG.json`: shards as Ray actors.

Ray decides where an actor runs, starts it again and moves it when its node is lost. This process asks every actor for
its address, again and again, and writes the answers where the router looks. Its actors end with it.
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
from lorikeet.launcher.processes.restart_policy import MOST_ENDS
from lorikeet.proto import logs
from lorikeet.proto.config_file import ConfigFile

_POLL_S = 0.5
_CONNECT_S = 20.0
_SILENT_S = 5.0
"""An actor answers at once: one that does not is between two nodes."""
_REMIND_S = 30.0
_MOST_DEATHS = 10
"""An actor that Ray starts again keeps its callers waiting. One that fails so many calls in turn is gone for good."""


@dataclass(frozen=True)
class RayConfig(ConfigFile):
    """What this process is told."""

    shard: dict[str, Any]
    """The fields of every shard's configuration but for what its node decides."""
    num_shards: int
    bundle: dict[str, float]
    """What one shard takes of a node, in Ray's words: `{"CPU": 1, "GPU": 1}`."""
    secret_path: str
    """Of the secret that routers show; Ray brings its text to the nodes."""
    addresses_path: str
    """Where the JSON list of addresses is written."""
    ready_file: str
    """Path of a file that appears once all shards take requests."""
    served_file: str
    """The same once one has completed a request."""
    hidden: tuple[str, ...] = ()
    """Environment variables that shards must not see."""
    module: str = "lorikeet.shard"
    """What is started on a node."""
    json_output: bool = False
    log_level: str = "info"


class Watched:
    """One actor, whichever node it is on just now."""

    def __init__(self, index: int, actor: Any, log: logging.Logger) -> None:
        self.actor = actor
        self.address: str | None = None
        """None while there is no shard that answers."""
        self.is_ready = False
        self.has_served = False
        self._index = index
        self._log = log
        self._asked: Any = None
        self._asked_at = 0.0
        self._last = ""
        """The latest address."""
        self._num_ends = 0
        self._num_deaths = 0

    def look(self) -> None:
        """Once in a while; never waits. Raises LauncherError where it makes no sense to go on."""
        import ray

        now = time.monotonic()
        if self._asked is None:
            self._asked, self._asked_at = self.actor.state.remote(), now
        if not ray.wait([self._asked], timeout=0)[0]:
            if now - self._asked_at > _SILENT_S:
                self._lost("does not answer")
            return
        asked, self._asked = self._asked, None
        try:
            state: State = ray.get(asked)
        except ray.exceptions.RayActorError as error:
            self._lost("has ended")
            self._num_deaths += 1
            if self._num_deaths >= _MOST_DEATHS:
                raise LauncherError(Exit.SHARD_FAILED, f"Ray gave up shard {self._index}: {error}") from None
            return
        self._num_deaths = 0
        self._found(state)

    def _found(self, state: State) -> None:
        if state.problem:
            raise LauncherError(Exit.SHARD_CANNOT_START, state.problem)
        if self._last and state.address != self._last:
            self._num_ends = 1 if self.has_served else self._num_ends + 1
            self.has_served = False
            if self._num_ends >= MOST_ENDS:
                sentence = f"ended the {MOST_ENDS}th time running without having completed a request"
                raise LauncherError(Exit.SHARD_KEEPS_ENDING, f"shard {self._index} {sentence}")
        if state.address != self.address:
            self._log.info("shard %d is at %s", self._index, state.address)
        self.address = self._last = state.address
        self.is_ready = state.is_ready
        self.has_served = self.has_served or state.has_served

    def _lost(self, how: str) -> None:
        if self.address is not None:
            self._log.error("shard %d at %s %s: Ray starts another one", self._index, self.address, how)
        self.address = None
        self.is_ready = False


class RayEngine:
    """All shards of one server, in one placement group: a bundle for each."""

    def __init__(self, config: RayConfig, ended: threading.Event, log: logging.Logger) -> None:
        """`ended` is set where somebody wants it to end."""
        self._config = config
        self._ended = ended
        self._log = log
        self._group: Any = None
        self._shards: list[Watched] = []
        self._told: list[str] | None = None

    def run(self) -> None:
        """Until asked to end. Raises LauncherError."""
        self._tell([])
        try:
            if self._place():
                self._start()
                self._watch()
        finally:
            self._end()

    def _place(self) -> bool:
        """Wait until there is room for all; False where the end came first."""
        import ray

        config = self._config
        # Apart where that can be, so that a lost node takes as few along as possible.
        self._group = ray.util.placement_group([config.bundle] * config.num_shards, strategy="SPREAD")
        remind_at = time.monotonic() + _POLL_S
        while not self._group.wait(timeout_seconds=_POLL_S):
            if self._ended.is_set():
                return False
            if time.monotonic() > remind_at:
                remind_at = time.monotonic() + _REMIND_S
                free = {name: ray.available_resources().get(name, 0.0) for name in config.bundle}
                self._log.warning(
                    "waiting for room for %d shards that take %s each: Ray has %s",
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
            self._shards.append(Watched(index, handle, self._log))

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            for shard in self._shards:
                shard.look()
            self._tell([shard.address for shard in self._shards if shard.address is not None])
            if all(shard.is_ready for shard in self._shards):
                Path(self._config.ready_file).touch()
            if any(shard.has_served for shard in self._shards):
                Path(self._config.served_file).touch()

    def _tell(self, addresses: list[str]) -> None:
        """Write them in one piece: the router may read at any moment."""
        if addresses == self._told:
            return
        path = Path(self._config.addresses_path)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(addresses))
        os.replace(new, path)
        self._told = addresses

    def _end(self) -> None:
        """The shards get a moment; then whatever is left of them goes with its place."""
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
        # Only now: Ray sets handlers of its own.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        RayEngine(config, ended, log).run()
    except LauncherError as error:
        log.error("%s", error)
        return error.exit
    return Exit.OK


def _connect() -> None:
    """To the cluster that RAY_ADDRESS names, or the one of this machine. Raises LauncherError."""
    import ray

    where = os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        raise LauncherError(Exit.SHARD_CANNOT_START, f"RAY_ADDRESS {where}: run the launcher on a node of the cluster")
    try:
        _wait_for(where)
        # What shards say stays in Ray's log files: it puts words of its own before each line.
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        sentence = f"no Ray cluster answers at {where or 'this machine'}: {error}"
        raise LauncherError(Exit.SHARD_CANNOT_START, sentence) from None


def _wait_for(address: str) -> None:
    """Until somebody listens there. Raises OSError after a while: Ray's own patience is of minutes."""
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

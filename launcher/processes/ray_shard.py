"""One shard as a Ray actor: it starts `python -m lorikeet.shard` on its node and reports the address.

The actor exits with the shard, so that Ray restarts it. Nothing here imports ray before it runs in an actor.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorikeet.launcher.processes import serving
from lorikeet.proto.children import Child
from lorikeet.proto.process import environment_of_children, free_port

END_S = 8.0
"""Less than the launcher waits for the Ray engine."""
_POLL_S = 0.1
_FOLDERS = ("model_path", "draft_model", "adapter_store")


@dataclass(frozen=True)
class State:
    """The state of an actor's shard."""

    address: str
    """`host:port`; a restarted shard has another one."""
    is_ready: bool
    """Whether it accepts requests."""
    has_served: bool
    """Whether it has completed a request."""
    problem: str = ""
    """Why the shard cannot run on this node."""


class RayShard:
    """The actor."""

    def __init__(self, module: str, fields: dict[str, Any], secret: str, hidden: Sequence[str]) -> None:
        """`fields`: the shard's configuration without what depends on the node. `hidden`: variables it does not get."""
        self._is_ending = False
        self._folder = Path(tempfile.mkdtemp(prefix="lorikeet-"))
        self._ready_file, self._served_file = self._folder / "ready", self._folder / "served"
        host = node_address()
        self._problem = missing(fields, host)
        self._address = f"{f'[{host}]' if ':' in host else host}:{free_port(host)}"
        self._child: Child | None = None
        if not self._problem:
            self._child = self._start(module, fields, secret, hidden)
            threading.Thread(target=self._end_with, args=(self._child,), name="shard", daemon=True).start()

    def state(self) -> State:
        """The address and state of the shard."""
        return State(self._address, self._ready_file.exists(), self._served_file.exists(), self._problem)

    def end(self) -> None:
        """End the shard."""
        self._is_ending = True
        if self._child is not None:
            self._child.terminate()
            self._child.wait(END_S)
            self._child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, module: str, fields: dict[str, Any], secret: str, hidden: Sequence[str]) -> Child:
        secret_path = self._folder / "secret"
        secret_path.touch(mode=0o600)
        secret_path.write_text(secret)
        own = {"listen": self._address, "secret_path": str(secret_path), "parent_pid": os.getpid()}
        files = {"ready_file": str(self._ready_file), "served_file": str(self._served_file)}
        config = serving.write(self._folder / "shard.json", fields | own | files)
        environment = {name: text for name, text in os.environ.items() if name not in hidden}
        return Child("the shard", module, config, environment_of_children(environment))

    def _end_with(self, child: Child) -> None:
        """Exit the actor when the shard exits by itself, so that Ray restarts it."""
        while not child.wait(_POLL_S):
            pass
        if not self._is_ending:
            print(child.ending, flush=True)
            child.kill()  # and its own children
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)


def node_address() -> str:
    """The address of this node in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def missing(fields: dict[str, Any], host: str) -> str:
    """A sentence about a folder that this node lacks; empty if it has all."""
    for name in _FOLDERS:
        path = fields.get(name)
        if path is not None and not Path(path).is_dir():
            return f"node {host} has no folder {path}: model and adapters must be on a volume that all nodes share"
    return ""

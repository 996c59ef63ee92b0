"""A Ray cluster of several nodes on this machine. Needs Ray."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

_CONFIG = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
    "worker_niceness": 0,
}
"""A lost node is detected after about five seconds, and actors have normal priority: Ray's defaults are 30 s and 15."""


class RayCluster:
    """A head node without resources, and other nodes."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _CONFIG}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, num_cpus: int) -> None:
        """Add a node with these resources."""
        self._cluster.add_node(num_cpus=num_cpus)

    def node_of(self, pid: int) -> Any:
        """The node that a process runs on, by its ancestors; None if there is none."""
        above = set(_above(pid))
        for node in self._cluster.worker_nodes:
            if above & {info.process.pid for infos in node.all_processes.values() for info in infos}:
                return node
        return None

    def running(self, module: str) -> list[int]:
        """Processes on the nodes that run `python -m module`."""
        words = f"\0-m\0{module}\0".encode()
        found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if words in _bytes(path)]
        return [pid for pid in (int(path.parent.name) for path in found) if self.node_of(pid) is not None]

    def lose(self, node: Any) -> None:
        """Kill the node's processes."""
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()


def _above(pid: int) -> Iterator[int]:
    """The parent of a process, its parent, and so on."""
    while pid > 1 and (stat := _bytes(Path(f"/proc/{pid}/stat"))):
        pid = int(stat.rpartition(b")")[2].split()[1])
        yield pid


def _bytes(path: Path) -> bytes:
    """The text of a file below /proc; empty if the process has exited."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@contextmanager
def started(num_nodes: int, num_cpus: int) -> Iterator[RayCluster]:
    before = os.environ.get("RAY_ADDRESS")  # set by Ray's class
    result = RayCluster()
    try:
        for _ in range(num_nodes):
            result.add(num_cpus)
        yield result
    finally:
        result.end()
        os.environ.pop("RAY_ADDRESS", None)
        if before is not None:
            os.environ["RAY_ADDRESS"] = before

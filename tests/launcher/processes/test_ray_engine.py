"""Shards on Ray: a cluster of three nodes on this machine, with small processes that stand in for shards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'lorikeet[ray]'")

from lorikeet.launcher.exits import Exit
from tests.launcher.processes.test_supervisor import ROOT, gone
from tests.ray_cluster import RayCluster, started

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with started(num_nodes=2, num_cpus=2) as result:
        yield result


class Engine:
    """The Ray engine and its output."""

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self.folder = folder
        self.process = process

    @property
    def addresses(self) -> list[str]:
        path = self.folder / "shards.json"
        addresses: list[str] = json.loads(path.read_text()) if path.exists() else []
        return addresses

    @property
    def pids(self) -> list[int]:
        """Process ids of shards in the order of their starts."""
        path = self.folder / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [int(line.split()[-1]) for line in lines if " started " in line]

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, (self.addresses, self.pids, self.output())
            assert self.process.poll() is None, self.output()
            time.sleep(0.05)

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait(self) -> int:
        return self.process.wait(60)


@contextmanager
def running(cluster: RayCluster, folder: Path, *, num: int = 2, **shard: Any) -> Iterator[Engine]:
    (folder / "secret").write_text("a secret that is long enough")
    config = {
        "shard": {"name": "shard", "log": str(folder / "log"), "model_path": str(folder)} | shard,
        "num_shards": num,
        "bundle": {"CPU": 1},
        "secret_path": str(folder / "secret"),
        "addresses_path": str(folder / "shards.json"),
        "ready_file": str(folder / "ready"),
        "served_file": str(folder / "served"),
        "hidden": ["HF_TOKEN"],
        "module": "tests.launcher.processes.stand_in",
    }
    (folder / "ray.json").write_text(json.dumps(config))
    environment = dict(os.environ) | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "RAY_ADDRESS": cluster.address}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lorikeet.launcher.processes.ray_engine", str(folder / "ray.json")],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    engine = Engine(folder, process)
    try:
        yield engine
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                process.kill()
        assert all(map(gone, engine.pids))


def test_shards_get_a_node_an_address_and_the_secret(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path) as engine:
        engine.until(lambda: len(engine.addresses) == len(engine.pids) == 2)
        assert len(set(engine.addresses)) == 2
        engine.until((tmp_path / "ready").exists)
        assert not (tmp_path / "served").exists()
        assert cluster.node_of(engine.pids[0]) is not cluster.node_of(engine.pids[1])
        command = Path(f"/proc/{engine.pids[0]}/cmdline").read_text().split("\0")
        config = json.loads(Path(command[-2]).read_text())
        assert config["listen"] in engine.addresses
        assert Path(config["secret_path"]).read_text() == "a secret that is long enough"
        assert Path(config["secret_path"]).stat().st_mode & 0o777 == 0o600
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait() == Exit.OK
        assert sum(line.startswith("shard ended") for line in (tmp_path / "log").read_text().splitlines()) == 2
        assert not Path(config["secret_path"]).parent.exists()
        assert "long enough" not in engine.output()


def test_a_shard_that_is_killed_comes_back_elsewhere_on_the_list(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path) as engine:
        engine.until(lambda: len(engine.addresses) == len(engine.pids) == 2)
        before = set(engine.addresses)
        os.kill(engine.pids[0], signal.SIGKILL)
        engine.until(lambda: len(engine.pids) == 3 and len(set(engine.addresses) - before) == 1)
        assert len(set(engine.addresses) & before) == 1


def test_shards_of_a_lost_node_come_back_on_another(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path) as engine:
        engine.until(lambda: len(engine.addresses) == len(engine.pids) == 2)
        before = set(engine.addresses)
        lost, kept = map(cluster.node_of, engine.pids)
        cluster.lose(lost)
        try:
            engine.until(lambda: len(engine.pids) == 3 and len(set(engine.addresses) - before) == 1)
            assert len(set(engine.addresses) & before) == 1
            assert cluster.node_of(engine.pids[2]) is kept
            assert gone(engine.pids[0]) and not gone(engine.pids[1])
        finally:
            cluster.add(2)


def test_a_shard_that_always_exits_ends_the_engine(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, num=1, die_after_s=3.0, exit_code=4) as engine:
        assert engine.wait() == Exit.SHARD_KEEPS_ENDING
        assert "shard 0 ended the 5th time in a row without completing a request" in engine.output()


def test_a_shard_that_serves_in_between_is_restarted(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, num=1, die_after_s=2.0, exit_code=4, serves=True) as engine:
        engine.until(lambda: len(engine.pids) == 7)
        assert (tmp_path / "served").exists()


def test_a_node_without_the_model_is_an_error(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, adapter_store=str(tmp_path / "nowhere")) as engine:
        assert engine.wait() == Exit.SHARD_CANNOT_START
        assert f"has no folder {tmp_path / 'nowhere'}: model and adapters must be on a volume" in engine.output()


def test_the_engine_waits_for_resources(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, num=5) as engine:
        engine.until(lambda: "waiting for room for 5 shards that take {'CPU': 1} each" in engine.output())
        assert engine.addresses == [] and engine.pids == []
        cluster.add(1)
        engine.until(lambda: len(engine.addresses) == len(engine.pids) == 5)


def test_shards_end_with_an_engine_that_was_killed(cluster: RayCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path) as engine:
        engine.until(lambda: len(engine.addresses) == len(engine.pids) == 2)
        engine.process.kill()
        engine.wait()
        end = time.monotonic() + 120
        while not all(map(gone, engine.pids)):
            assert time.monotonic() < end
            time.sleep(0.1)

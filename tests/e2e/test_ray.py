"""A server with shards on Ray: requests survive a lost node."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'lorikeet[ray]'")

from lorikeet.launcher.exits import Exit
from tests.e2e import tiny_server_model
from tests.e2e.launched import Launched, alive
from tests.ray_cluster import RayCluster, started

pytestmark = pytest.mark.long

FLAGS = ("--engine", "ray", "--device", "cpu", "--replicas", "2", "--threads", "1", "--cpu-memory", "64MiB")
LONG = {"inputs": "one two", "parameters": {"max_new_tokens": 300, "ignore_eos_token": True}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with started(num_nodes=2, num_cpus=2) as result:
        yield result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server_model.make(tmp_path_factory.mktemp("model"))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_requests_survive_a_lost_node(cluster: RayCluster, model: Path) -> None:
    with Launched("--model-id", str(model), *FLAGS, RAY_ADDRESS=cluster.address) as server:
        server.wait_for("is ready at")
        until(lambda: len(httpx.get(f"{server.url}/info").json()["shards"]) == 2)
        answer = httpx.post(f"{server.url}/generate", json=LONG, timeout=120)
        assert answer.status_code == 200, (answer.text, server.output)
        expected = answer.json()["generated_text"]
        texts: list[str | int] = []
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                answer = httpx.post(f"{server.url}/generate", json=LONG, timeout=300)
                texts.append(answer.json()["generated_text"] if answer.status_code == 200 else answer.status_code)

        clients = [threading.Thread(target=load) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            time.sleep(1.0)
            cluster.lose(cluster.node_of(cluster.running("shard")[0]))
            server.wait_for("shard_lost")
            server.wait_for("Ray restarts it")
            server.wait_for("shard_connected")
        finally:
            over.set()
            for client in clients:
                client.join()
        assert len(texts) > 4 and set(texts) == {expected}
        running = cluster.running("shard")
        assert len(running) == 2
        server.signal(signal.SIGTERM)
        assert server.wait() == Exit.OK
        assert not any(map(alive, running))


def test_a_missing_cluster_is_an_error(model: Path) -> None:
    with Launched("--model-id", str(model), *FLAGS, RAY_ADDRESS="127.0.0.1:1") as server:
        server.wait_for("no Ray cluster answers at 127.0.0.1:1")
        assert server.wait() == Exit.SHARD_CANNOT_START

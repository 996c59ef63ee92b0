"""Remote shards: they join and leave while a router serves, and accept only routers with the secret."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from lorikeet.launcher.exits import Exit
from tests.e2e import tiny_server_model
from tests.e2e.launched import Launched, free_port

SMALL = ("--cpu-memory", "64MiB", "--threads", "1")
LONG = {"inputs": "one two", "parameters": {"max_new_tokens": 300, "ignore_eos_token": True}}


class Machines:
    """A router over the addresses in a file, and shards with separate launchers."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.model = model
        self._stack = stack
        self._file = folder / "shards.json"
        self.secret = folder / "secret"
        self.secret.write_text("a secret that is long enough")
        self.addresses: list[str] = []

    def shard(self) -> Launched:
        """Started, ready, and on the list."""
        address = f"127.0.0.1:{free_port()}"
        launched = self.shard_at(address, "--shard-secret-file", str(self.secret))
        launched.wait_for(f"is ready at {address}")
        self.list(*self.addresses, address)
        return launched

    def shard_at(self, address: str, *flags: str) -> Launched:
        """Started."""
        flags = ("--shard-listen", address, *flags, *SMALL)
        return self._stack.enter_context(Launched("--model-id", str(self.model), *flags))

    def list(self, *addresses: str) -> None:
        self.addresses = [*addresses]
        self._file.write_text(json.dumps(self.addresses))

    def router(self, *flags: str) -> Launched:
        return self.router_of(f"file:{self._file}", *flags)

    def router_of(self, source: str, *flags: str, under: Sequence[str] = ()) -> Launched:
        flags = ("--shard-address", source, *flags, *SMALL[:2])
        return self._stack.enter_context(Launched("--model-id", str(self.model), *flags, under=under))


@contextmanager
def made(folder: Path, model: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(folder, model, stack)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_server_model.make(tmp_path_factory.mktemp("model"))


@pytest.mark.long
def test_a_rolling_restart_under_load_changes_no_answer(tmp_path: Path, model: Path) -> None:
    """A new shard joins, an old one is terminated, and its address leaves the list."""
    with made(tmp_path, model) as here:
        old = [here.shard(), here.shard()]
        router = here.router("--shard-secret-file", str(here.secret))
        router.wait_for("is ready at")
        assert len(router.children()) == 2
        expected = httpx.post(f"{router.url}/generate", json=LONG, timeout=60).json()["generated_text"]
        texts: list[str | int] = []
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                answer = httpx.post(f"{router.url}/generate", json=LONG, timeout=120)
                texts.append(answer.json()["generated_text"] if answer.status_code == 200 else answer.status_code)

        clients = [threading.Thread(target=load) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            for leaving in old:
                here.shard()
                router.wait_for("shard_connected")
                leaving.signal(signal.SIGTERM)
                here.list(*here.addresses[1:])
                assert leaving.wait() == Exit.OK
                router.wait_for("shard_left")
        finally:
            over.set()
            for client in clients:
                client.join()
        assert len(texts) > 8 and set(texts) == {expected}
        shards = httpx.get(f"{router.url}/info").json()["shards"]
        assert len(shards) == 2
        router.signal(signal.SIGTERM)
        assert router.wait() == Exit.OK


@pytest.mark.long
def test_a_shard_accepts_only_its_secret(tmp_path: Path, model: Path) -> None:
    with made(tmp_path, model) as here:
        here.shard()
        wrong = tmp_path / "wrong"
        wrong.write_text("another secret, as long")
        for flags in ((), ("--shard-secret-file", str(wrong))):
            router = here.router(*flags)
            router.wait_for("UNAUTHENTICATED: this shard requires its secret")
            assert httpx.get(f"{router.url}/ready").status_code == 503
            router.signal(signal.SIGTERM)
            router.wait()
            assert here.secret.read_text() not in router.output


@pytest.mark.long
def test_a_killed_shard_is_restarted_at_its_address(tmp_path: Path, model: Path) -> None:
    with made(tmp_path, model) as here:
        shard = here.shard()
        router = here.router("--shard-secret-file", str(here.secret))
        router.wait_for("is ready at")
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{router.url}/generate", json=LONG, timeout=120))
        )
        asking.start()
        time.sleep(0.2)
        os.kill(shard.child("shard"), signal.SIGKILL)
        asking.join()
        assert answers[0].status_code == 200
        again = httpx.post(f"{router.url}/generate", json=LONG, timeout=60)
        assert again.json()["generated_text"] == answers[0].json()["generated_text"]


NAME = "shards.example"


def with_hosts(folder: Path, *lines: str) -> list[str]:
    """A command that runs another with an /etc/hosts of its own. Skips if that is not permitted."""
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{line}\n" for line in ("127.0.0.1 localhost", *lines)))
    under = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    if subprocess.run([*under, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("/etc/hosts cannot be replaced for one process")
    return under


def tls_files(folder: Path, *names: str) -> dict[str, tuple[str, ...]]:
    """Flags for certificates of one CA: a shard's, for these names, and a router's."""
    folder.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca")
    flags = {}
    for whose, pair in (("shard", authority.issue_cert(*names)), ("router", authority.issue_cert("router.example"))):
        pair.private_key_pem.write_to_path(folder / f"{whose}.key")
        pair.cert_chain_pems[0].write_to_path(folder / f"{whose}.cert")
        own = ("--shard-tls-cert", str(folder / f"{whose}.cert"), "--shard-tls-key", str(folder / f"{whose}.key"))
        flags[whose] = (*own, "--shard-tls-ca", str(folder / "ca"))
    return flags


@pytest.mark.long
def test_a_dns_name_of_several_shards_with_tls(tmp_path: Path, model: Path) -> None:
    flags, other = tls_files(tmp_path / "ours", NAME), tls_files(tmp_path / "theirs", NAME)
    under, port = with_hosts(tmp_path, *(f"127.0.0.{number} {NAME}" for number in (1, 2))), free_port()
    source = f"dns:{NAME}:{port}"
    with made(tmp_path, model) as here:
        addresses = [f"127.0.0.{number}:{port}" for number in (1, 2)]
        shards = [here.shard_at(address, *flags["shard"]) for address in addresses]
        for shard, address in zip(shards, addresses, strict=True):
            shard.wait_for(f"is ready at {address}")
        router = here.router_of(source, *flags["router"], under=under)
        router.wait_for("is ready at")
        expected = httpx.post(f"{router.url}/generate", json=LONG, timeout=60).json()["generated_text"]
        end = time.monotonic() + 20
        while len(httpx.get(f"{router.url}/info").json()["shards"]) < 2:
            assert time.monotonic() < end, router.output
            time.sleep(0.1)
        # a certificate of another CA, and none
        wrong = {"CERTIFICATE_VERIFY_FAILED": other["router"], "Socket closed": flags["router"][-2:]}
        for reason, given in wrong.items():
            other_router = here.router_of(source, *given, under=under)
            assert reason in other_router.wait_for("shard_unreachable", 60)
            assert httpx.get(f"{other_router.url}/ready").status_code == 503
            assert not any("ssl_transport_security" in line for line in other_router.lines)
            other_router.signal(signal.SIGTERM)
            other_router.wait()
        shards[0].signal(signal.SIGTERM)
        assert shards[0].wait() == Exit.OK
        for _ in range(3):  # the other one answers
            answer = httpx.post(f"{router.url}/generate", json=LONG, timeout=60)
            assert answer.json()["generated_text"] == expected
        router.signal(signal.SIGTERM)
        assert router.wait() == Exit.OK

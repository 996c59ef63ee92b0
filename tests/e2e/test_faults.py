"""Full disks and hubs that hang or send wrong data: the affected request fails, and other requests are not delayed."""

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load, save

from tests.e2e.launched import ROOT, Launched
from tests.hub_server import HubServer, Repository, Trouble, hub

TOKEN = "hf_right"
PUBLIC, PRIVATE, WELL = "owner/fills", "owner/fills-privately", "owner/well"
PROMPT = 'Record:\nname = "Wamiko"\nscore = 93\n\nAs JSON:\n'
BOUND_S = 3.0
"""Time limit for a silent hub: three times HF_HUB_DOWNLOAD_TIMEOUT."""
SAMPLE = (Trouble.MUTE, Trouble.STALLED, Trouble.OTHER)


@dataclass
class Disk:
    """A small file system that can be filled."""

    folder: Path
    is_own: bool

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self) -> None:
        """Fill it to the last byte. Skips the test if no file system could be mounted."""
        if not self.is_own:
            pytest.skip("a file system cannot be mounted here")
        with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def make_room(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def files(self) -> set[str]:
        """Its files, without the ballast and the notes about public names."""
        found = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}
        return {name for name in found if name != self._ballast.name and not name.startswith("public/")}


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Disk]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    is_own = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield Disk(folder, is_own)
    finally:
        if is_own:  # lazily: a child that is exiting may still hold a file
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class Scene:
    launched: Launched
    hub: HubServer
    cache: Path
    """The hub's cache, in which no incomplete or wrong file may stay."""
    store: Disk
    logs: Disk
    expected: dict[str, str] = field(default_factory=dict)
    """Texts of the base and of a loaded adapter, by alias."""

    def ask(self, adapter: str | None = None, **fields: Any) -> httpx.Response:
        parameters = {"max_new_tokens": 16, "adapter_id": adapter, **fields}
        body = {"inputs": PROMPT, "parameters": parameters}
        return httpx.post(f"{self.launched.url}/generate", json=body, timeout=120)

    def from_hub(self, id: str) -> tuple[int, str, float]:
        """Status, text or error, and the seconds it took."""
        began = time.monotonic()
        answer = self.ask(id, adapter_source="hub", api_token=TOKEN)
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)
        body = answer.json()
        return answer.status_code, body.get("generated_text") or body["error"], time.monotonic() - began

    def undisturbed(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """The base and the loaded adapter answer as usual while `meanwhile` runs; then no resource is held."""
        over = threading.Event()
        seconds: list[float] = []

        def ask_on(name: str) -> set[str]:
            texts = set()
            while not texts or not over.is_set():
                began = time.monotonic()
                texts.add(self.ask(name).json()["generated_text"])
                seconds.append(time.monotonic() - began)
            return texts

        with ThreadPoolExecutor(2) as pool:
            asking = {name: pool.submit(ask_on, name) for name in self.expected}
            try:
                meanwhile()
            finally:
                over.set()
            assert {name: {self.expected[name]} for name in asking} == {n: each.result() for n, each in asking.items()}
        assert statistics.median(seconds) < BOUND_S / 2
        self.until_idle()

    def until_idle(self) -> None:
        names = ("kv_pages_used", "active_requests", "running_requests", "shard_waiting_requests", "adapters_loading")
        end = time.monotonic() + 20
        while any(held := {name: self.counted(f"lorikeet_{name}") for name in names}.values()):
            assert time.monotonic() < end, held
            time.sleep(0.05)
        assert self.counted("lorikeet_shard_ready") == 1

    def counted(self, name: str) -> float:
        lines = httpx.get(f"{self.launched.url}/metrics").text.splitlines()
        (value,) = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " ")]
        return value


def adapter(name: str, **changes: Any) -> dict[str, bytes]:
    """One of the demo model's adapters, as a repository."""
    folder = ROOT / "demo" / "adapters" / name
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = json.loads(files["adapter_config.json"]) | changes
    return files | {"adapter_config.json": json.dumps(config).encode()}


def small(**changes: Any) -> dict[str, bytes]:
    """A part of one, which is fetched fast."""
    files = adapter("record", target_modules=["v_proj"], **changes)
    tensors = load(files["adapter_model.safetensors"])
    kept = {key: value for key, value in tensors.items() if ".v_proj." in key}
    return files | {"adapter_model.safetensors": save(kept)}


def troubled(trouble: Trouble) -> str:
    return f"owner/{trouble.name.lower()}"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("faults")
    repositories = {PUBLIC: Repository(adapter("citation")), PRIVATE: Repository(adapter("query"), token=TOKEN)}
    repositories[WELL] = Repository(small())
    for trouble in Trouble:  # with different content each
        repositories[troubled(trouble)] = Repository(small(revision=trouble.name), trouble=trouble)
    with ExitStack() as stack:
        store = stack.enter_context(mounted(folder / "store", "32m"))
        logs = stack.enter_context(mounted(folder / "logs", "1m"))
        at_hub = stack.enter_context(hub(repositories))
        arguments = ["--cpu-memory", "256MiB", "--threads", "1", "--adapter-store", str(store.folder)]
        arguments += ["--usage-log", str(logs.folder / "usage"), "--receipts", str(logs.folder / "receipts")]
        environment = {"HF_ENDPOINT": at_hub.url, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "0"}
        environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "1"
        launched = stack.enter_context(Launched(*arguments, **environment))
        launched.wait_until_ready()
        scene = Scene(launched, at_hub, folder / "hub", store, logs)
        scene.expected = {name: scene.ask(name).json()["generated_text"] for name in ("__base_model__", "json")}
        assert len(set(scene.expected.values())) == 2
        yield scene


@pytest.fixture(scope="module")
def answers(scene: Scene) -> dict[Trouble, tuple[int, str, float]]:
    """The result of each fault, all at once."""
    found: dict[Trouble, tuple[int, str, float]] = {}

    def ask_all() -> None:
        with ThreadPoolExecutor(len(Trouble)) as pool:
            results = pool.map(lambda trouble: scene.from_hub(troubled(trouble)), Trouble)
            found.update(zip(Trouble, results, strict=True))

    before = scene.store.files()
    scene.undisturbed(ask_all)
    assert scene.store.files() == before
    left = {path.suffix for path in scene.cache.rglob("*") if path.is_file()}
    assert not left & {".safetensors", ".incomplete"}, left
    return found


@pytest.mark.parametrize(
    "trouble", [pytest.param(each, marks=() if each in SAMPLE else pytest.mark.long) for each in Trouble]
)
def test_a_faulty_hub_fails_only_the_affected_request(
    scene: Scene, answers: dict[Trouble, tuple[int, str, float]], trouble: Trouble
) -> None:
    status, text, seconds = answers[trouble]
    assert status == 503 and troubled(trouble) in text, text
    assert not any(inner in text for inner in (TOKEN, scene.hub.url, str(scene.store.folder.parent)))
    assert seconds < 5 * BOUND_S
    scene.hub.repositories[troubled(trouble)].trouble = None
    expected = scene.from_hub(WELL)
    assert expected[0] == 200 and scene.from_hub(troubled(trouble))[:2] == expected[:2]


def test_a_full_disk_fails_only_adapters_that_are_being_loaded(scene: Scene) -> None:
    """One fits into the hub's cache but not into the store, the other not even into the cache."""
    before = scene.store.files()
    scene.store.fill()
    answers: dict[str, tuple[int, str, float]] = {}

    def ask_both() -> None:
        with ThreadPoolExecutor(2) as pool:
            answers.update(zip((PUBLIC, PRIVATE), pool.map(scene.from_hub, (PUBLIC, PRIVATE)), strict=True))

    scene.undisturbed(ask_both)
    for id, (status, text, _) in answers.items():
        assert status == 503
        assert id in text and "cannot be stored: No space left on device" in text
        assert TOKEN not in text and str(scene.store.folder.parent) not in text
    assert scene.store.files() == before
    scene.store.make_room()
    assert {scene.from_hub(id)[0] for id in answers} == {200}
    scene.until_idle()


def test_a_full_disk_delays_no_request_and_lost_lines_are_logged_once(scene: Scene) -> None:
    usage, receipts = (scene.logs.folder / name for name in ("usage", "receipts"))
    scene.logs.fill()
    for _ in range(12):  # a started page has room for some lines
        assert scene.ask(max_new_tokens=1).status_code == 200
    scene.undisturbed()
    for words in ("usage_dropped", "receipts_not_written"):
        (found,) = [line for line in scene.launched.lines if words in line]
        assert "No space left on device" in found or "only a part of a line" in found
    assert scene.counted('lorikeet_usage_dropped_total{to="file"}') > 0
    scene.logs.make_room()
    scene.undisturbed()
    scene.launched.wait_for("receipts_written_again", 20)
    end = time.monotonic() + 20
    for path in (usage, receipts):
        while not whole(path)[-1]:
            assert time.monotonic() < end, path.read_text()[-999:]
            time.sleep(0.05)
        assert whole(path).count(False) <= 1  # none where the last line ended with the page


def whole(path: Path) -> list[bool]:
    """For each line, whether it is complete."""
    return [line.endswith("}") and line.startswith("{") for line in path.read_text().splitlines()]

"""The browser, servers and a visit. A browser ends with its file: playwright's loop would disturb tests after it."""

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.page.browsing import CHROMIUM, TEXT, Server, Visit

AXE = "axe-core@4.14.1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright from PyPI")
    if not CHROMIUM:
        pytest.skip("needs chromium (Debian: apt-get install chromium)")
    # names for the server that are not loopback addresses, so that their origins are no secure contexts
    names = "--host-resolver-rules=MAP lorikeet.test 127.0.0.1, MAP hostile.test 127.0.0.1"
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", names])
        yield started
        started.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("page"), allowed_hosts=("lorikeet.test",)) as started:
        yield started


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with adapters, of which it lists `first` and `second`."""
    folder = tmp_path_factory.mktemp("adapting")
    catalogue = folder / "catalogue.yaml"
    catalogue.write_text("".join(f"{name}: {{source: local, id: {name}}}\n" for name in ("first", "second", "third")))
    for name in ("first", "second", "third"):
        (folder / "roots" / name).mkdir(parents=True)
        (folder / "roots" / name / "adapter_config.json").write_text("{}")
        (folder / "roots" / name / "adapter_model.safetensors").write_text(name)
    with Server(folder, adapters=True, catalogue_path=str(catalogue)) as started:
        yield started


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Visit]:
    server.serving.says(TEXT, ends=True)
    server.serving.shard.submits.clear()
    started = Visit(browser, server.url)
    yield started
    started.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    subprocess.run(["npm", "pack", AXE], cwd=folder, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()

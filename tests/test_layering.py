"""Who may import whom. The table in ARCHITECTURE.md is enforced here."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("router", "shard", "adapters", "launcher", "proto", "demo", "benchmarks")
OURS = frozenset(PACKAGES) | {"tests"}
GENERATED = ("_pb2.py", "_pb2_grpc.py")
FORBIDDEN = {
    "proto": OURS - {"proto"},
    "router": frozenset({"torch", "shard", "launcher", "demo", "benchmarks", "tests"}),
    "shard": frozenset({"router", "fastapi", "starlette", "uvicorn", "launcher", "demo", "benchmarks", "tests"}),
    "adapters": frozenset({"grpc", "fastapi", "router", "shard", "launcher", "demo", "benchmarks", "tests"}),
    "launcher": frozenset({"router", "shard", "torch", "transformers", "grpc", "benchmarks", "tests"}),
    "demo": frozenset({"router", "shard", "launcher", "tests"}),
    "benchmarks": frozenset(),  # they measure everything, and run the tests' functions at full size
}
WITHOUT_TORCH = (
    "shard/scheduler/request.py",
    "shard/scheduler/kv_cache.py",
    "shard/scheduler/scheduler.py",
    "adapters/refs.py",
)


def sources(package: str) -> list[Path]:
    return [
        path
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.name.endswith(GENERATED) and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it, relative ones resolved."""
    return imports_of(path.read_text(), path.relative_to(ROOT).parent.parts)


def imports_of(code: str, package: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def reached(path: Path) -> set[str]:
    """Top names of every module that a file imports, by way of our own modules too."""
    seen: set[Path] = set()
    tops: set[str] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imports(current):
            tops.add(name.partition(".")[0])
            waiting.extend(_files(name))
    return tops


def _files(name: str) -> list[Path]:
    """Our files that importing `name` runs: the module and every package around it."""
    parts = name.split(".")
    if parts[0] not in OURS:
        return []
    packages = [ROOT.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
    return [path for path in [*packages, ROOT.joinpath(*parts).with_suffix(".py")] if path.is_file()]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_that_it_may_not(package: str) -> None:
    files = sources(package)
    assert files
    for path in files:
        bad = {name for name in imports(path) if name.partition(".")[0] in FORBIDDEN[package]}
        assert not bad, f"{path.relative_to(ROOT)} imports {', '.join(sorted(bad))}"


@pytest.mark.parametrize("package", ["router", "launcher"])
def test_torch_is_not_reached_by_a_detour(package: str) -> None:
    for path in sources(package):
        assert "torch" not in reached(path), f"{path.relative_to(ROOT)} reaches torch"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_plain_state_machines_import_no_torch(name: str) -> None:
    assert "torch" not in reached(ROOT / name)


def test_imports_are_found_wherever_they_hide() -> None:
    code = "import torch.nn\ndef f():\n    from router import app\nfrom . import batch\nfrom ..proto import shard_pb2\n"
    assert set(imports_of(code, ("shard", "model"))) == {
        "torch.nn",
        "router",
        "lorikeet.router.api.app",
        "lorikeet.shard.model",
        "lorikeet.shard.model.batch",
        "shard.proto",
        "shard.proto.shard_pb2",
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_names_say_what_a_module_is_about(package: str) -> None:
    for path in sources(package):
        names = {path.stem, *path.relative_to(ROOT).parent.parts}
        assert not names & {"utils", "util", "helpers", "misc", "common"}, path


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_says_what_it_knows(package: str) -> None:
    for path in sources(package):
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc, f"{path.relative_to(ROOT)} does not open with what it knows"
        prose = [line for line in doc.splitlines() if not line.startswith((" ", "│", "├", "└"))]
        assert len(prose) <= 10, f"{path.relative_to(ROOT)} opens with more than a few lines"


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_of_one_noun(package: str) -> None:
    for path in sources(package):
        assert len(path.read_text().splitlines()) <= 400, f"{path.relative_to(ROOT)} is too long"


@pytest.mark.parametrize("package", ["proto", "adapters"])
def test_names_that_others_use_too_are_ours(package: str) -> None:
    """proto-plus installs a package called proto, AdapterHub one called adapters."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).parent == ROOT / package

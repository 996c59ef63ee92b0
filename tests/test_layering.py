"""Which folder may import which: the folders in their order, without cycles. ARCHITECTURE.md describes them."""

import ast
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "lorikeet"
PACKAGES = ("router", "shard", "adapters", "launcher", "proto", "demo", "benchmarks")
INSTALLED = frozenset(PACKAGES) - {"benchmarks"}
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MAX_MODULES = 16
MAX_LINES, MOST_P95 = 60, 22
"""Limits on the lines of functions."""

FORBIDDEN = {
    "proto": INSTALLED - {"proto"},
    "router": frozenset({"torch", "transformers", "shard", "launcher", "demo"}),
    "shard": frozenset({"router", "fastapi", "starlette", "uvicorn", "launcher", "demo", "adapters"}),
    "adapters": frozenset({"grpc", "fastapi", "router", "shard", "launcher", "demo"}),
    "launcher": frozenset({"router", "shard", "torch", "transformers", "grpc", "demo"}),
    "demo": frozenset({"router", "shard", "launcher"}),
    "benchmarks": frozenset[str](),  # they measure everything, and run the tests' functions at full size
}
"""What a package never imports: third-party modules and packages of ours."""
EXCEPTIONS = {"router/output/parser_worker.py": {"transformers"}}
"""Modules that run in processes of their own; no other module imports them."""

WITHOUT_TORCH = (
    "shard/requests/request.py",
    "shard/scheduler/kv_cache.py",
    "shard/scheduler/scheduler.py",
    "adapters/refs.py",
)

FOLDERS = {
    "adapters": ("", "sources", "formats", "medusa", "loader"),
    "router": (
        "text", "requests", "schemas", "metrics", "shards", "adapters", "output", "dispatch", "api/routes", "api", "",
    ),
    "shard": (
        "system", "requests", "speculation", "scheduler", "batch", "speculation/device", "sampling", "attention",
        "model/kernels", "model/quantization", "model/lora", "model/moe", "model/tensor_parallel", "model/medusa",
        "model/adapters", "model/fusion", "model/pooling", "model/gguf", "model", "ranks", "grpc", "grammar",
        "learning", "engine", "adapters", "startup", "",
    ),
    "launcher": ("config", "models", "processes", "cli", "bench", ""),
    "demo": ("data/tasks", "data", "training", "evaluation", "smollm2", ""),
    "proto": ("gguf", ""),
}  # fmt: skip
"""Every folder of the installed package."""


MIN_LINES = 40
SHARED = "used by packages that must not import each other"
SPECIALIZED = "Triton code, which is imported only where Triton is installed"
SHORT = {
    "shard/speculation/grammar.py": "one source of drafts",
    "proto/outputs.py": SHARED,
    "proto/server_url.py": SHARED,
    "proto/version.py": SHARED,
    "shard/grammar/triton.py": SPECIALIZED,
    "shard/system/cores.py": "imports torch, which the modules of the process must not",
    "shard/system/memory.py": "used by attention, adapters and drafts",
    "shard/system/operators.py": "used by the Triton modules of every folder",
}
"""Modules with fewer lines, and why each is a module. `__init__` and `__main__` need no reason."""


@cache
def sources(package: str) -> list[Path]:
    return [
        path
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.name.endswith(GENERATED) and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


@dataclass
class Parsed:
    """What the tests read of a file. The rest of its tree is not kept: it would make every collection slower."""

    docstring: str | None
    imports: list[ast.stmt]
    functions: list[tuple[int, str, int]]
    """Line, name and number of lines of each."""


@cache
def parsed(path: Path) -> Parsed:
    tree = ast.parse(path.read_text())
    found = Parsed(ast.get_docstring(tree), [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            found.functions.append((node.lineno, node.name, size))
    return found


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of the modules that a file imports, wherever in it."""
    return tuple(names_in(parsed(path).imports, (PACKAGE, *path.relative_to(ROOT).parent.parts)))


def imports_of(code: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    return names_in(ast.walk(code), package)


def names_in(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def top(name: str) -> str:
    """The package of ours that a module belongs to, or the top-level name of another one."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] or first if first == PACKAGE else first


@cache
def file_of(name: str) -> Path | None:
    """The file of a module or package of ours."""
    parts = name.split(".")
    if parts[0] == PACKAGE:
        parts = parts[1:]
    elif parts[0] != "benchmarks":
        return None
    if not parts:
        return None
    stem = ROOT.joinpath(*parts)
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def imported_files(path: Path) -> frozenset[Path]:
    """Our files that a file imports, other than itself; `from package import name` may name a module."""
    found = set[Path]()
    for node in parsed(path).imports:
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path.relative_to(ROOT)}: a relative import"
            for alias in node.names:
                found.add(file_of(f"{node.module}.{alias.name}") or file_of(node.module) or path)
        elif isinstance(node, ast.Import):
            found |= {file_of(alias.name) or path for alias in node.names}
    return frozenset(found - {path})


def reached(path: Path) -> set[str]:
    """Top-level names of every module that a file imports, through our own modules too."""
    seen, tops, waiting = set[Path](), set[str](), [path]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imports(current):
            tops.add(top(name))
            parts = name.split(".")
            packages = (file_of(".".join(parts[:depth])) for depth in range(2, len(parts) + 1))
            waiting.extend(file for file in packages if file is not None)
    return tops


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a directed graph, [] without any."""
    finished, path = set[str](), list[str]()

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if found := visit(other):
                return found
        path.pop()
        finished.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node))), [])


def all_sources() -> list[Path]:
    return [path for package in sorted(INSTALLED) for path in sources(package)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_forbidden(package: str) -> None:
    assert sources(package)
    for path in sources(package):
        allowed = EXCEPTIONS.get(str(path.relative_to(ROOT)), set())
        bad = {name for name in imports(path) if top(name) in FORBIDDEN[package] - allowed}
        assert not bad, f"{path.relative_to(ROOT)} imports {', '.join(sorted(bad))}"


def test_our_packages_are_imported_as_lorikeet() -> None:
    """`import router` would load a module a second time, and fails after an installation."""
    for path in [*all_sources(), *sources("benchmarks"), *sorted((ROOT / "tests").rglob("*.py"))]:
        bad = {name for name in imports(path) if name.partition(".")[0] in INSTALLED}
        assert not bad, f"{path.relative_to(ROOT)}: import {PACKAGE}.{min(bad)} instead"


def test_nothing_installed_imports_benchmarks_or_tests() -> None:
    for path in all_sources():
        bad = {name for name in imports(path) if name.partition(".")[0] in ("benchmarks", "tests", "examples")}
        assert not bad, f"{path.relative_to(ROOT)} imports {', '.join(sorted(bad))}"


@pytest.mark.parametrize("package", ["router", "launcher"])
def test_torch_is_not_imported_indirectly(package: str) -> None:
    for path in sources(package):
        assert "torch" not in reached(path), f"{path.relative_to(ROOT)} imports torch indirectly"


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_a_process_of_its_own_is_imported_by_no_module(name: str) -> None:
    assert not [path for path in all_sources() if ROOT / name in imported_files(path)]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_state_machines_import_no_torch(name: str) -> None:
    assert "torch" not in reached(ROOT / name)


def test_files_have_no_import_cycle() -> None:
    graph = {
        str(path.relative_to(ROOT)): {str(other.relative_to(ROOT)) for other in imported_files(path)}
        for path in [*all_sources(), *sources("benchmarks")]
    }
    assert not cycle(graph), " -> ".join(cycle(graph))


def test_folders_have_no_import_cycle() -> None:
    """A module next to subfolders counts by itself: subfolders import `errors`, and `__main__` imports them."""
    outer = {path.parent.parent for path in all_sources() if path.name == "__init__.py"}

    def node(path: Path) -> str:
        return str((path if path.parent in outer else path.parent).relative_to(ROOT))

    graph: dict[str, set[str]] = {}
    for path in all_sources():
        graph.setdefault(node(path), set()).update({node(other) for other in imported_files(path)} - {node(path)})
    assert not cycle(graph), " -> ".join(cycle(graph))


@pytest.mark.parametrize("package", sorted(INSTALLED))
def test_every_folder_is_listed_and_imports_earlier_folders(package: str) -> None:
    listed = FOLDERS[package]
    found = {str(path.parent.relative_to(ROOT / package)).removeprefix(".") for path in sources(package)}
    assert found == set(listed)
    rank = {folder: number for number, folder in enumerate(listed)}
    outer = {folder.rpartition("/")[0] for folder in listed if folder}
    for path in sources(package):
        folder = str(path.parent.relative_to(ROOT / package)).removeprefix(".")
        for other in () if folder in outer else imported_files(path):
            if not other.is_relative_to(ROOT / package):
                continue
            target = str(other.parent.relative_to(ROOT / package)).removeprefix(".")
            if target not in outer:
                assert rank[target] <= rank[folder], f"{path.relative_to(ROOT)} imports later {other.relative_to(ROOT)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_too_many_modules(package: str) -> None:
    counts: dict[Path, int] = {}
    for path in [*sources(package), *(ROOT / package).glob("ui/**/*.js")]:
        counts[path.parent] = counts.get(path.parent, 0) + (path.name != "__init__.py")
    assert all(count <= MAX_MODULES for count in counts.values()), counts


def test_imports_are_found_anywhere_in_a_file() -> None:
    code = "import torch.nn\ndef f():\n    from lorikeet.router import app\n"
    code += "from . import batch\nfrom ..proto import shard_pb2\n"
    assert set(imports_of(ast.parse(code), (PACKAGE, "shard", "model"))) == {
        "torch.nn",
        "lorikeet.router",
        "lorikeet.router.app",
        "lorikeet.shard.model",
        "lorikeet.shard.model.batch",
        "lorikeet.shard.proto",
        "lorikeet.shard.proto.shard_pb2",
    }


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not cycle({"a": {"b", "c"}, "b": {"c"}})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_named_after_nothing(package: str) -> None:
    for path in sources(package):
        names = {path.stem, *path.relative_to(ROOT).parent.parts}
        assert not names & {"utils", "util", "helpers", "misc", "common"}, path


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_has_a_short_docstring(package: str) -> None:
    for path in sources(package):
        doc = parsed(path).docstring
        assert doc, f"{path.relative_to(ROOT)} has no docstring"
        prose = [line for line in doc.splitlines() if not line.startswith((" ", "│", "├", "└"))]
        assert len(prose) <= 10, f"the docstring of {path.relative_to(ROOT)} is too long"


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short(package: str) -> None:
    for path in sources(package):
        assert len(path.read_text().splitlines()) <= 800, f"{path.relative_to(ROOT)} is too long"


def test_a_short_module_has_a_reason() -> None:
    paths = [path for package in INSTALLED - {"demo"} for path in sources(package) if not path.stem.startswith("__")]
    short = {str(path.relative_to(ROOT)) for path in paths if len(path.read_text().splitlines()) < MIN_LINES}
    assert short == set(SHORT)


def test_functions_fit_a_screen() -> None:
    """Lines of every function, its signature and docstring included; Triton's kernels are one function each."""
    sizes = {
        f"{path.relative_to(ROOT)}:{line} {name}": size
        for path in all_sources()
        if "triton" not in path.name and path.relative_to(ROOT).parts[0] != "demo"
        for line, name, size in parsed(path).functions
    }
    too_long = [name for name, size in sizes.items() if size > MAX_LINES]
    assert not too_long, "\n".join(too_long)
    assert statistics.quantiles(sizes.values(), n=20)[-1] <= MOST_P95

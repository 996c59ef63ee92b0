"""Hashes of sources: what changes them and what does not; and the globs of suites against what processes import."""

import ast
import asyncio
from functools import cache
from pathlib import Path

import pytest

from benchmarks.catalogue import SUITES
from benchmarks.evidence import sources
from benchmarks.evidence.figure import Suite
from benchmarks.evidence.sources import REPOSITORY, digest, files_of
from benchmarks.load import servers
from tests.oracles import family
from tests.test_layering import imports_of

PYTHON = """
from lorikeet.shard.request import Request


def double(x: int) -> int:
    return 2 * x
"""
KERNEL = """
@triton.jit
def kernel(x):
    y = x + 1
    return y
"""
RECORDER = """
import os, sys

class Recorder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("lorikeet."):
            with open(os.environ["IMPORT_RECORD"], "a") as record:
                record.write(name + chr(10))

sys.meta_path.insert(0, Recorder)
"""
"""As sitecustomize.py: notes the modules of ours that a process imports."""
EVIDENCE = REPOSITORY / "benchmarks" / "evidence"


def hashed(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    (folder / name).write_text(text)
    sources.file_digest.cache_clear()
    return digest(["*/*"], folder.parent)


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        (PYTHON, PYTHON.replace("2 * x", "2 * x  # twice"), True),
        (PYTHON, '"""Doubles."""\n' + PYTHON.replace("    return", '    """Twice."""\n\n    return'), True),
        (PYTHON, PYTHON.replace("shard.request", "shard.scheduler.request"), True),
        (PYTHON, PYTHON.replace("2 * x", "(2*x)"), True),
        (PYTHON, PYTHON.replace("2 * x", "3 * x"), False),
        (PYTHON, PYTHON.replace("import Request", "import Answer"), False),
        (KERNEL, KERNEL.replace("    return", "    # the sum\n\n    return"), True),
        (KERNEL, KERNEL.replace("x + 1", "(x + 1)"), False),
    ],
)
def test_python_counts_by_its_syntax_tree_and_kernels_by_their_text(
    old: str, new: str, is_same: bool, tmp_path: Path
) -> None:
    assert (hashed(tmp_path / "a", "x.py", old) == hashed(tmp_path / "a", "x.py", new)) is is_same


def test_c_counts_by_its_text_without_comments(tmp_path: Path) -> None:
    first = hashed(tmp_path / "a", "x.c", "int a; // one\n/* two\n*/ int b;\n")
    assert hashed(tmp_path / "a", "x.c", "int a; \n\n  int b;\n") == first
    assert hashed(tmp_path / "a", "x.c", "int a;\n int c;\n") != first


def test_a_moved_file_keeps_the_hash_and_a_renamed_weight_file_too(tmp_path: Path) -> None:
    assert hashed(tmp_path / "a", "x.py", PYTHON) == hashed(tmp_path / "a", "y.py", PYTHON)
    assert hashed(tmp_path / "a", "w.bin", "1") != hashed(tmp_path / "a", "w.bin", "2")


def test_globs_exclude_and_must_match(tmp_path: Path) -> None:
    hashed(tmp_path / "a", "x.py", PYTHON)
    (tmp_path / "a" / "y.py").write_text(KERNEL)
    assert files_of(["a/*.py", "!a/y.py"], tmp_path) == {tmp_path / "a" / "x.py"}
    with pytest.raises(ValueError, match="matches no file"):
        files_of(["b/*.py"], tmp_path)


def own_file(name: str) -> Path | None:
    """The file of a module of benchmarks or tests."""
    stem = REPOSITORY.joinpath(*name.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def own_imports(path: Path) -> tuple[Path | None, ...]:
    names = imports_of(ast.parse(path.read_text()), path.relative_to(REPOSITORY).parent.parts)
    return tuple(own_file(name) for name in names if name.split(".")[0] in ("benchmarks", "tests"))


def reached(module: str) -> set[Path]:
    """Files of benchmarks and tests that a module imports, wherever in a file and through each other."""
    found, waiting = set[Path](), [own_file(module)]
    while waiting:
        path = waiting.pop()
        if path is None or path in found:
            continue
        found.add(path)
        waiting += own_imports(path)
    return {path for path in found if path.name != "__init__.py" and EVIDENCE not in path.parents}


@cache
def has_code(path: Path) -> bool:
    return any(not isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_suite_declares_the_benchmark_modules_that_it_imports(suite: Suite) -> None:
    measure = getattr(suite.measure, "func", suite.measure)
    declared = files_of(suite.all_sources)
    missing = {str(path.relative_to(REPOSITORY)) for path in reached(measure.__module__) - declared if has_code(path)}
    assert not missing, "add these to the suite's sources"


@pytest.mark.long
def test_the_processes_of_a_server_import_declared_modules_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of request to the embedded model: no adapter, adapters, lookup, heads and a draft model."""
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    record = tmp_path / "imported"
    monkeypatch.setenv("IMPORT_RECORD", str(record))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY / 'src'}:{REPOSITORY}")
    options = [None, *(family.DraftOptions(method, 3) for method in family.METHODS)]
    asked = [(family.TextRequest("def f(x):", kind, 8), each) for kind in family.KINDS.values() for each in options]
    with servers.running("imports", family.command()) as server:
        asyncio.run(family.ask_all(server.port, asked, 4))
    declared = files_of(sources.SERVER)
    stems = {name: REPOSITORY.joinpath(*name.split(".")[1:]) for name in record.read_text().split()}
    files = {stem.with_suffix(".py") for stem in stems.values()} | {stem / "__init__.py" for stem in stems.values()}
    imported = {path for path in files if path.is_file() and "_pb2" not in path.name and has_code(path)}
    assert len(imported) > 100
    assert not {str(path.relative_to(REPOSITORY)) for path in imported - declared}

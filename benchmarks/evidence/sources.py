"""The code that a figure depends on: globs of files, and a hash that changes only if a figure could.

Python counts by its syntax tree without docstrings, and imports of our own modules by the imported names, so that
comments, formatting and a file's place do not matter. C and Triton kernels are compiled from their text, which counts
without its comments. Everything else, such as weights, counts byte by byte.
"""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OWN = ("lorikeet", "benchmarks", "tests")
ROUTER = ("router/**/*.py", "proto/*.py", "proto/*.proto")
ENGINE = (
    "shard/**/*",
    "proto/*.py",
    "proto/*.proto",
    "!shard/**/*triton*.py",
    "!shard/**/cuda*.py",
    "!shard/**/tuned/*",
    "!shard/attention/kernel_limits.json",
)
"""The shard on a CPU."""
ADAPTERS = ("adapters/**/*.py", "!adapters/medusa/*.py")
"""The loader and the command that checks catalogues."""
SERVER = (*ENGINE, *ROUTER, *ADAPTERS, "adapters/medusa/format.py", "launcher/**/*.py", "!launcher/cli/*.py")
EMBEDDED_MODEL = ("demo/base/*", "demo/adapters/**/*", "demo/heads/**/*", "demo/draft/*", "demo/data/**/*.py")
RANDOM_MODEL = ("benchmarks/models/*.py",)
HTTP_LOAD = ("benchmarks/load/*.py", "launcher/bench/*.py", *RANDOM_MODEL)
IGNORED = re.compile(r"__pycache__|\.pyc$|_pb2(_grpc)?\.pyi?$|\.md$")


def files_of(globs: Iterable[str], root: Path = REPOSITORY) -> frozenset[Path]:
    """The files that the globs match; one with `!` excludes. Raises ValueError if another one matches nothing."""
    found: set[Path] = set()
    for glob in globs:
        matches = {path for path in root.glob(glob.removeprefix("!")) if path.is_file() and not _is_ignored(path, root)}
        if not matches and not glob.startswith("!"):
            raise ValueError(f"{glob} matches no file")
        found = found - matches if glob.startswith("!") else found | matches
    return frozenset(found)


def _is_ignored(path: Path, root: Path) -> bool:
    return IGNORED.search(str(path.relative_to(root))) is not None


def digest(globs: Iterable[str], root: Path = REPOSITORY) -> str:
    """The hash of all files that the globs match, whatever their names."""
    hashes = sorted(file_digest(path) for path in files_of(globs, root))
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


@cache
def file_digest(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".py":
        content = "\n".join(normalized_python(content.decode())).encode()
    elif path.suffix in (".c", ".h"):
        content = without_c_comments(content.decode()).encode()
    return hashlib.sha256(content).hexdigest()


def normalized_python(text: str) -> list[str]:
    """The syntax tree without docstrings, and the text of every Triton kernel without comments."""
    tree = ast.parse(text)
    kernels = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                kernels.append(_without_comments(ast.get_source_segment(text, node) or ""))
            node.body = [each for each in node.body if not _is_docstring(each)] or [ast.Pass()]
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] in OWN):
            node.module, node.level = None, 0
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in OWN:
                    alias.name = alias.name.rpartition(".")[2]
    return [ast.dump(tree), *kernels]


def _is_docstring(node: ast.stmt) -> bool:
    """A text by itself: the docstring of a module, class, function or of the attribute before it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _without_comments(text: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    dropped = (tokenize.COMMENT, tokenize.NL)
    return " ".join(token.string for token in tokens if token.type not in dropped)


def without_c_comments(text: str) -> str:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())

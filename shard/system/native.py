"""Builds a C source with the machine's compiler, once per machine and source, and loads it.

The library is kept in the user's cache folder under a hash of source, headers, flags, compiler and processor.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_SHARD = Path(__file__).parents[1]
"""Sources include headers by their path from here."""
FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")


class CompilerMissing(RuntimeError):
    """There is no C compiler, or it cannot compile the source for this processor."""


@cache
def library(source: Path, *defines: str) -> ctypes.CDLL:
    """The library of `source`, compiled with `-D` for each of `defines`.

    Import torch first: both must use the same OpenMP runtime. Raises CompilerMissing.
    """
    candidates = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise CompilerMissing("no C compiler (cc, gcc or clang) on this machine")
    flags = (*FLAGS, f"-I{_SHARD}", *(f"-D{define}" for define in defines))
    texts = [path.read_text() for path in (source, *sorted(_SHARD.rglob("*.h")))]
    key = hashlib.sha256("\0".join([*texts, compiler, *flags, _processor()]).encode()).hexdigest()[:20]
    built = _cache_folder() / f"{source.stem}-{key}.so"
    if not built.exists():
        _build(compiler, flags, source, built)
    return ctypes.CDLL(str(built))


def _build(compiler: str, flags: tuple[str, ...], source: Path, built: Path) -> None:
    """Compile into the target's folder, then rename: another process never sees a partial file."""
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        command = [compiler, *flags, str(source), "-o", str(fresh), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode != 0:
            raise CompilerMissing(f"{compiler} failed: {result.stderr.strip()[-500:]}")
        fresh.replace(built)


def _cache_folder() -> Path:
    """A private folder in this user's cache, or a temporary one if home is not writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorikeet"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="lorikeet-"))


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))

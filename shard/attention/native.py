"""Builds cpu.c with the machine's C compiler, once per machine and source, and loads it.

The result lies in the user's cache folder under a hash of source, flags, compiler and processor. Knows nothing of
attention.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
SOURCE = Path(__file__).with_name("cpu.c")


class CompilerMissing(RuntimeError):
    """No C compiler here, or it could not build the source."""


@cache
def load(bf16: bool) -> ctypes.CDLL:
    """The library for bfloat16 or float32 elements. torch must be imported before: both share one OpenMP runtime."""
    compiler = next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        raise CompilerMissing("no C compiler (cc, gcc or clang) on this machine")
    flags = (*FLAGS, f"-DBF16={int(bf16)}")
    key = hashlib.sha256("\0".join([SOURCE.read_text(), compiler, *flags, _processor()]).encode()).hexdigest()[:20]
    library = _cache_folder() / f"attention-{key}.so"
    if not library.exists():
        _build(compiler, flags, library)
    return ctypes.CDLL(str(library))


def _build(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    """Compile beside the target, then rename: a second process never sees half a file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [compiler, *flags, str(SOURCE), "-o", str(fresh), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode != 0:
            raise CompilerMissing(f"{compiler} failed: {result.stderr.strip()[-500:]}")
        fresh.replace(library)


def _cache_folder() -> Path:
    """A private folder of this user's cache, or a fresh temporary one where home cannot be written."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        (base / "lorikeet").mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(base / "lorikeet", os.W_OK):
            return base / "lorikeet"
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="lorikeet-"))


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))

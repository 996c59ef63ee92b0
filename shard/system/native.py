"""Builds a C source with the machine's compiler, once per machine and source, and loads it; without a compiler, the
one that the wheel brings (prebuilt.py).

The library is kept in the user's cache folder under a hash of source, headers, flags, compiler and processor. Its code
runs in this process, so only files are loaded that belong to this user and that nobody else may write.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import structlog

from lorikeet.shard.system import prebuilt

FLAGS = (*prebuilt.COMMON_FLAGS, "-march=native", "-mtune=generic")
"""Tuned like the prebuilt libraries: gcc contracts sums in another order for some processors (Zen 3)."""
HINT = "install gcc (Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc)"

log = structlog.get_logger()


class CompilerMissing(RuntimeError):
    """There is no C compiler, or it cannot compile the source for this processor, nor a prebuilt library."""


@cache
def library(source: Path, *defines: str) -> ctypes.CDLL:
    """The library of `source`, compiled with `-D` for each of `defines`.

    Import torch first: both must use the same OpenMP runtime. Raises CompilerMissing.
    """
    try:
        path = _compiled(source, defines)
    except CompilerMissing as reason:
        library = prebuilt.find(source, defines)
        if library is None:
            sentence = f"{reason}, and this installation has no kernels for this processor: {HINT}"
            raise CompilerMissing(sentence) from None
        _log_level(library.parent.name, str(reason))
        path = library
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerMissing(f"{path.name} cannot be loaded ({error}): {HINT}") from None


@cache
def _log_level(level: str, reason: str) -> None:
    """Once per process and level."""
    log.info("prebuilt_kernels", processor=level, reason=reason)


def _compiled(source: Path, defines: tuple[str, ...]) -> Path:
    """The library in the cache, built if it is not there. Raises CompilerMissing."""
    candidates = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise CompilerMissing("no C compiler (cc, gcc or clang) on this machine")
    flags = (*FLAGS, f"-I{prebuilt.SHARD}", *(f"-D{define}" for define in defines))
    texts = [path.read_text() for path in (source, *sorted(prebuilt.SHARD.rglob("*.h")))]
    key = hashlib.sha256("\0".join([*texts, compiler, *flags, _processor()]).encode()).hexdigest()[:20]
    built = _cache_folder() / f"{source.stem}-{key}.so"
    is_there = built.exists()
    if is_there and not is_own(built):
        log.warning("kernels_compiled_again", path=str(built), reason="others own the file or may write it")
        is_there = False
    if not is_there:
        _build(compiler, flags, source, built)
    return built


def is_own(path: Path) -> bool:
    """Whether a file or folder belongs to this user, or to root, and nobody else may write it."""
    status = path.lstat()
    kind = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    return kind and status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _build(compiler: str, flags: tuple[str, ...], source: Path, built: Path) -> None:
    """Compile into the target's folder, then rename: another process never sees a partial file."""
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        command = [compiler, *flags, str(source), "-o", str(fresh), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode != 0:
            raise CompilerMissing(f"{compiler} failed: {result.stderr.strip()[-500:]}")
        fresh.chmod(0o700)
        fresh.replace(built)


def _cache_folder() -> Path:
    """A private folder in this user's cache, or a temporary one if home is not writable or others may write there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorikeet"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_own(folder) or not _keeps_its_folders(folder.parent):
            log.warning("kernels_not_kept", path=str(folder), reason="others own the folder or may replace it")
        elif os.access(folder, os.W_OK):
            return folder
    return _temporary_folder()


def _keeps_its_folders(parent: Path) -> bool:
    """Whether not everybody may rename the folders in `parent`."""
    mode = parent.stat().st_mode
    return bool(mode & stat.S_ISVTX) or not mode & stat.S_IWOTH


@cache
def _temporary_folder() -> Path:
    """Private to this process, and deleted when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="lorikeet-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))

"""C sources compiled in advance, for levels of processors: what a machine without a compiler loads.

`build` fills the folder when a wheel is made (setup.py); native.py asks `find`. Imports the standard library only.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SHARD = Path(__file__).parents[1]
"""Sources include headers by their path from here."""
FOLDER = SHARD / "prebuilt"
_SAME_SUMS = "--param=avoid-fma-max-bits=0"
"""gcc rounds products before it adds them on some processors and not on others; results would differ between levels."""
COMMON_FLAGS = ("-O3", "-fopenmp", "-ffp-contract=fast", _SAME_SUMS, "-fno-math-errno", "-shared", "-fPIC")
"""Also those of a library that is compiled on the machine that loads it."""
TESTED_GLIBC = (2, 34)
"""The oldest version of the C library that a wheel is for (RHEL 9)."""

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_TILES = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")
"""Tiles are used only if the system permits them at run time (`prepare` in model/kernels/cpu.c)."""


@dataclass(frozen=True)
class Level:
    """Processors that run the same machine code."""

    name: str
    machine: str
    """As `platform.machine()` says it."""
    flags: tuple[str, ...]
    needs: frozenset[str]
    """Instruction sets, as /proc/cpuinfo names them."""
    only: frozenset[str] = frozenset()
    """Sources that differ from those of the levels below, if not all do."""


INTEGERS = "model/kernels/integer.c"
_ONLY_INTEGERS = frozenset({INTEGERS})
LEVELS = (
    Level("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}, _ONLY_INTEGERS),
    Level("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", *_TILES), _V4 | {"avx512_bf16"}),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}, _ONLY_INTEGERS),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86-64-v2", "x86_64", ("-march=x86-64-v2",), _V2),
    Level("aarch64-dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"}), _ONLY_INTEGERS),
    Level("aarch64", "aarch64", ("-march=armv8-a",), frozenset({"asimd"})),
)
"""Best first."""

LIBRARIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("system/cores.c", ()),
    ("speculation/history.c", ()),
    ("speculation/lookup.c", ()),
    ("attention/cpu.c", ("BF16=0", "PAIRED=1")),
    ("attention/cpu.c", ("BF16=1", "PAIRED=1")),
    ("model/lora/targets.c", ("BF16=0",)),
    ("model/lora/targets.c", ("BF16=1",)),
    ("model/kernels/float32.c", ()),
    ("model/kernels/cpu.c", ()),
    (INTEGERS, ("BF16=0",)),
    (INTEGERS, ("BF16=1",)),
)
"""Sources below the folder of the shard, and the macros that they are compiled with."""


def own_levels() -> list[Level]:
    """The levels that this machine's processor has, best first."""
    machine, own = platform.machine(), _instructions()
    return [level for level in LEVELS if level.machine == machine and level.needs <= own]


def find(source: Path, defines: Sequence[str]) -> Path | None:
    """The library of `source` for this processor, if there is one."""
    if not source.is_relative_to(SHARD):
        return None
    name = file_name(str(source.relative_to(SHARD)), defines)
    paths = (FOLDER / level.name / name for level in own_levels())
    return next((path for path in paths if path.is_file()), None)


def file_name(source: str, defines: Sequence[str]) -> str:
    """The library's name; `source` is a path below the folder of the shard."""
    return ".".join([*source.removesuffix(".c").split("/"), *defines, "so"])


def build(folder: Path, levels: Sequence[Level] = LEVELS) -> list[str]:
    """Compile every library into `folder`/LEVEL for each level that this machine has a compiler for, itself or a cross
    compiler. Returns one line per level or library that could not be compiled.
    """
    missing, tasks = [], []
    for level in levels:
        compiler = _compiler(level.machine)
        if compiler is None:
            missing.append(f"no kernels for {level.name}: there is no gcc for {level.machine}")
            continue
        tasks += [(compiler, level, *library) for library in libraries(level)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = pool.map(lambda task: _compile(folder, *task), tasks)
        return [*missing, *filter(None, reasons)]


def libraries(level: Level) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The libraries of a level: sources and macros."""
    return (library for library in LIBRARIES if not level.only or library[0] in level.only)


def _compiler(machine: str) -> str | None:
    """A gcc: code of clang would need its own OpenMP runtime, which torch does not have."""
    names = [f"{machine}-linux-gnu-gcc"]
    if sys.platform == "linux" and platform.machine() == machine:
        names.append("gcc")
    return next((path for name in names if (path := shutil.which(name))), None)


def _compile(folder: Path, compiler: str, level: Level, source: str, defines: tuple[str, ...]) -> str | None:
    """None, or why the library is not there."""
    built = folder / level.name / file_name(source, defines)
    built.parent.mkdir(parents=True, exist_ok=True)
    flags = (*COMMON_FLAGS, *level.flags, "-s", f"-I{SHARD}", *(f"-D{define}" for define in defines))
    command = [compiler, *flags, str(SHARD / source), "-o", str(built), "-lm"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False
    )  # on a busy machine it takes many minutes
    if done.returncode == 0:
        return None
    built.unlink(missing_ok=True)
    first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
    return f"no {built.name} for {level.name}: {first.strip()[:300]}"


@cache
def _instructions() -> frozenset[str]:
    """Instruction sets of this machine's first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(words, []))


def needed_glibc(folder: Path) -> tuple[int, int]:
    """The least version of the C library for the libraries in a folder: a linked library names the version of each
    symbol that it uses. At least TESTED_GLIBC.
    """
    found = {TESTED_GLIBC}
    for library in folder.rglob("*.so"):
        versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library.read_bytes())
        found |= {(int(major), int(minor)) for major, minor in versions}
    return max(found)

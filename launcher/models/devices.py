"""The machine's devices and versions, without importing torch."""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.proto.process import usable_cores
from lorikeet.proto.version import version


def choose(device: str) -> str:
    """`cpu` or `cuda:N` for the value of --device. Raises LauncherError if torch cannot use that device."""
    if device == "cpu":
        return device
    problem = cuda_problem()
    if device == "auto":
        return "cpu" if problem else "cuda:0"
    number = int(device.partition(":")[2] or 0)
    count = 0 if problem else count_cuda()
    if number >= count:
        reason = problem or f"{count} CUDA devices are there"
        raise LauncherError(Exit.NOT_ENOUGH_CUDA_DEVICES, f"--device {device}: {reason}")
    return f"cuda:{number}"


def warning(device: str) -> str:
    """Why --device auto is the CPU although the installed torch is for CUDA; empty if that is not so."""
    if device != "auto" or not torch_has_cuda() or not (problem := cuda_problem()):
        return ""
    return f"--device auto is the CPU: {problem} (--device cpu says so without this warning)"


def cuda_problem() -> str:
    """Why torch cannot use CUDA on this machine, as a sentence; empty if it can."""
    built_for = _torch_line("cuda")
    if built_for in (None, "None"):
        return "the installed torch is a CPU build"
    driver = _driver()
    if driver is None:
        return f"the installed torch is for CUDA {built_for}, and no NVIDIA driver (libcuda.so.1) is installed"
    driver_version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(driver_version))
    # A driver runs every minor version of its own major version.
    if driver_version.value and driver_version.value // 1000 < int(str(built_for).partition(".")[0]):
        supported = f"{driver_version.value // 1000}.{driver_version.value % 1000 // 10}"
        return (
            f"the NVIDIA driver supports CUDA up to {supported}, and the installed torch is for CUDA {built_for}:"
            f" install a newer driver, or a torch for CUDA {supported}"
        )
    if code := driver.cuInit(0):
        return f"the NVIDIA driver does not answer (cuInit returned {code}): try nvidia-smi, and look at its devices"
    return "" if count_cuda() else "the NVIDIA driver lists no device"


def check_compiler(device: str) -> None:
    """Raise LauncherError if Triton cannot compile what starts its kernels on a CUDA device."""
    if not device.startswith("cuda") or importlib.util.find_spec("triton") is None:
        return
    missing = []
    if not (os.environ.get("CC") or any(shutil.which(name) for name in ("gcc", "clang", "cc"))):
        missing.append("a C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        missing.append("Python's headers (Debian, Ubuntu: apt-get install python3-dev)")
    if missing:
        raise LauncherError(Exit.SHARD_CANNOT_START, f"CUDA kernels need {' and '.join(missing)}")


def of_each_node(device: str) -> str:
    """The device of a shard on a node of a cluster: a shard sees its own devices only."""
    return "cpu" if device == "cpu" else "cuda:0"


def check_count(device: str, num_replicas: int, num_ranks: int) -> None:
    """Raise LauncherError if there are too few CUDA devices for the replicas, from `device` on."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number) + num_replicas * num_ranks > (count := count_cuda()):
        split = "" if num_ranks == 1 else f" of --num-shard {num_ranks}"
        sentence = f"--replicas {num_replicas}{split} from {device} on: {count} CUDA devices are there"
        raise LauncherError(Exit.NOT_ENOUGH_CUDA_DEVICES, sentence)


def choose_ranks(sharded: bool | None, num_shard: int | None, device: str, environment: Mapping[str, str]) -> int:
    """The tensor-parallel size: --num-shard, or as in LoRAX the number of devices that the environment names.

    Raises LauncherError if --sharded is true and neither is given.
    """
    if num_shard is not None:
        return num_shard
    named = 0 if sharded is False or not device.startswith("cuda") else _named(environment)
    if sharded and named < 2:
        reason = "--sharded true needs --num-shard, or two or more devices in CUDA_VISIBLE_DEVICES"
        raise LauncherError(Exit.NOT_ENOUGH_CUDA_DEVICES, reason)
    return max(1, named)


def _named(environment: Mapping[str, str]) -> int:
    """Number of devices that the environment lists."""
    text = environment.get("CUDA_VISIBLE_DEVICES", environment.get("NVIDIA_VISIBLE_DEVICES", ""))
    return len([name for name in text.split(",") if name.strip() not in ("", "all", "none", "void")])


def count_cuda() -> int:
    """CUDA devices that this process may use (the driver follows CUDA_VISIBLE_DEVICES)."""
    driver = _driver()
    count = ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA."""
    return _torch_line("cuda") not in (None, "None")


def describe_runtime() -> str:
    """What `--env` prints: versions, processor, memory, graphics driver."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [
        "runtime environment:",
        f"  lorikeet: {version()}",
        f"  python: {platform.python_version()}",
        f"  platform: {platform.platform()}",
        f"  cores: {usable_cores()}",
        f"  memory: {memory / 2**30:.1f} GiB",
        f"  torch: {_torch_line('__version__')}",
        f"  nvidia-smi: {_nvidia_smi()}",
    ]
    return "\n".join(lines)


def _nvidia_smi() -> str:
    try:
        result = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return "not found"
    return "\n" + result.stdout


def _torch_line(name: str) -> str | None:
    """The value of `name` in torch/version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]?([^'\"\n]+)['\"]?$", text, re.MULTILINE)
    return match.group(1).strip() if match else None

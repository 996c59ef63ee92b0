"""Which device a shard runs on, found out without importing torch."""

import ctypes
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from lorikeet.launcher.exits import Exit, LauncherError


def choose(wanted: str) -> str:
    """`cpu` or `cuda:N` for the value of --device."""
    if wanted == "cpu":
        return wanted
    count = count_cuda() if torch_has_cuda() else 0
    if wanted == "auto":
        return "cuda:0" if count else "cpu"
    number = int(wanted.partition(":")[2] or 0)
    if number >= count:
        reason = f"{count} CUDA devices are there" if torch_has_cuda() else "the installed torch is a CPU build"
        raise LauncherError(Exit.NOT_ENOUGH_CUDA_DEVICES, f"--device {wanted}: {reason}")
    return f"cuda:{number}"


def of_each_node(wanted: str) -> str:
    """The same for nodes of a cluster, which shows a shard its own devices alone."""
    return "cpu" if wanted == "cpu" else "cuda:0"


def check_count(device: str, num_replicas: int, num_ranks: int) -> None:
    """Raise LauncherError where replicas from `device` on, of so many ranks, are more than there are CUDA devices."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number) + num_replicas * num_ranks > (count := count_cuda()):
        split = "" if num_ranks == 1 else f" of --num-shard {num_ranks}"
        sentence = f"--replicas {num_replicas}{split} from {device} on: {count} CUDA devices are there"
        raise LauncherError(Exit.NOT_ENOUGH_CUDA_DEVICES, sentence)


def choose_ranks(sharded: bool | None, num_shard: int | None, device: str, environment: Mapping[str, str]) -> int:
    """Over how many devices the model is split (LoRAX: as many as the environment names, unless it is said). Raises
    LauncherError where it is to be split and nobody says over how many.
    """
    if num_shard is not None:
        return num_shard
    if sharded is False or not device.startswith("cuda"):
        named = 0
    else:
        named = _named(environment)
    if sharded and named < 2:
        reason = "--sharded true needs --num-shard, or two devices and more in CUDA_VISIBLE_DEVICES"
        raise LauncherError(Exit.NOT_ENOUGH_CUDA_DEVICES, reason)
    return max(1, named)


def _named(environment: Mapping[str, str]) -> int:
    """Devices that the environment names one by one."""
    text = environment.get("CUDA_VISIBLE_DEVICES", environment.get("NVIDIA_VISIBLE_DEVICES", ""))
    return len([name for name in text.split(",") if name.strip() not in ("", "all", "none", "void")])


def count_cuda() -> int:
    """CUDA devices that this process may use (the driver follows CUDA_VISIBLE_DEVICES)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA."""
    return _torch_line("cuda") not in (None, "None")


def torch_version() -> str | None:
    return _torch_line("__version__")


def _torch_line(name: str) -> str | None:
    """The value that torch/version.py gives to `name`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}\b[^=\n]*= *['\"]?([^'\"\n]+)['\"]?$", text, re.MULTILINE)
    return found.group(1).strip() if found else None

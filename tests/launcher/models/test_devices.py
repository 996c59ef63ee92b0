"""Choice of devices, compared with torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lorikeet.launcher.exits import Exit, LauncherError
from lorikeet.launcher.models import devices


def test_cpu_is_always_available() -> None:
    assert devices.choose("cpu") == "cpu"


def test_the_version_is_torch_s() -> None:
    assert f"torch: {torch.__version__}\n" in devices.describe_runtime()
    assert devices.torch_has_cuda() == (torch.version.cuda is not None)


def test_auto_agrees_with_torch() -> None:
    assert devices.choose("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:99"])
def test_a_missing_device_is_an_error(device: str) -> None:
    number = int(device.partition(":")[2] or 0)
    if number < torch.cuda.device_count():
        assert devices.choose(device) == f"cuda:{number}"
        return
    with pytest.raises(LauncherError, match=f"--device {device}: ") as caught:
        devices.choose(device)
    assert caught.value.exit is Exit.NOT_ENOUGH_CUDA_DEVICES


@pytest.mark.parametrize(
    ("sharded", "num_shard", "device", "environment", "expected"),
    [
        (None, None, "cpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        (None, 2, "cpu", {}, 2),
        (None, None, "cuda:0", {}, 1),
        (None, None, "cuda:0", {"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        (None, None, "cuda:0", {"NVIDIA_VISIBLE_DEVICES": "all"}, 1),
        (None, None, "cuda:0", {"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
        (True, None, "cuda:0", {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, 3),
        (False, None, "cuda:0", {"CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        (True, 4, "cuda:0", {"CUDA_VISIBLE_DEVICES": "0,1"}, 4),
    ],
)
def test_the_environment_sets_the_number_of_ranks(
    sharded: bool | None, num_shard: int | None, device: str, environment: dict[str, str], expected: int
) -> None:
    assert devices.choose_ranks(sharded, num_shard, device, environment) == expected


@pytest.mark.parametrize(("device", "environment"), [("cpu", {}), ("cuda:0", {"CUDA_VISIBLE_DEVICES": "0"})])
def test_sharded_needs_a_number_of_devices(device: str, environment: dict[str, str]) -> None:
    with pytest.raises(LauncherError, match="--sharded true needs --num-shard") as caught:
        devices.choose_ranks(True, None, device, environment)
    assert caught.value.exit is Exit.NOT_ENOUGH_CUDA_DEVICES


def test_each_rank_of_each_replica_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_cuda", lambda: 4)
    devices.check_count("cuda:0", 2, 2)
    devices.check_count("cpu", 9, 9)
    with pytest.raises(LauncherError, match="--replicas 2 of --num-shard 2 from cuda:1 on: 4 CUDA devices are there"):
        devices.check_count("cuda:1", 2, 2)


def test_triton_needs_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(devices.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(devices.shutil, "which", lambda name: "/usr/bin/cc")
    devices.check_compiler("cpu")
    with pytest.raises(LauncherError, match=r"^CUDA kernels need Python's headers \(Debian, Ubuntu: .* python3-dev\)$"):
        devices.check_compiler("cuda:0")
    (tmp_path / "Python.h").touch()
    devices.check_compiler("cuda:0")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    with pytest.raises(LauncherError, match="need a C compiler"):
        devices.check_compiler("cuda:0")


class Driver:
    """A CUDA driver with scripted answers."""

    def __init__(self, version: int = 13000, init: int = 0, count: int = 1) -> None:
        self._version, self._init, self._count = version, init, count

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._version
        return 0

    def cuInit(self, flags: int) -> int:
        return self._init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._count
        return 0


@pytest.mark.parametrize(
    ("built_for", "driver", "problem"),
    [
        ("12.8", Driver(), ""),
        ("12.8", Driver(12040), ""),
        ("13.0", Driver(12040), "the NVIDIA driver supports CUDA up to 12.4, and the installed torch is for CUDA 13.0"),
        ("12.8", None, "the installed torch is for CUDA 12.8, and no NVIDIA driver (libcuda.so.1) is installed"),
        ("12.8", Driver(init=999), "the NVIDIA driver does not answer (cuInit returned 999)"),
        ("12.8", Driver(count=0), "the NVIDIA driver lists no device"),
        ("None", None, "the installed torch is a CPU build"),
    ],
)
def test_why_cuda_cannot_be_used_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, built_for: str, driver: Driver | None, problem: str
) -> None:
    monkeypatch.setattr(devices, "_torch_line", lambda name: built_for)
    monkeypatch.setattr(devices, "_driver", lambda: driver)
    said = devices.warning("auto")
    assert devices.choose("auto") == ("cpu" if problem else "cuda:0")
    assert devices.warning("cpu") == devices.warning("cuda") == ""
    if not problem:
        assert said == "" and devices.choose("cuda") == "cuda:0"
        return
    assert "\n" not in said
    assert said.startswith(f"--device auto is the CPU: {problem}") if built_for != "None" else said == ""
    with pytest.raises(LauncherError) as caught:
        devices.choose("cuda:1")
    assert str(caught.value).startswith(f"--device cuda:1: {problem}")
    assert caught.value.exit is Exit.NOT_ENOUGH_CUDA_DEVICES

"""Which device is chosen, without torch and against what torch says."""

import pytest
import torch

from launcher import devices
from launcher.exits import Exit, LauncherError


def test_cpu_is_always_there() -> None:
    assert devices.choose("cpu") == "cpu"


def test_the_version_is_torch_s() -> None:
    assert devices.torch_version() == torch.__version__
    assert devices.torch_has_cuda() == (torch.version.cuda is not None)


def test_auto_is_what_torch_would_find() -> None:
    assert devices.choose("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:99"])
def test_a_device_that_is_not_there_is_said(wanted: str) -> None:
    number = int(wanted.partition(":")[2] or 0)
    if number < torch.cuda.device_count():
        assert devices.choose(wanted) == f"cuda:{number}"
        return
    with pytest.raises(LauncherError, match=f"--device {wanted}: ") as caught:
        devices.choose(wanted)
    assert caught.value.exit is Exit.NOT_ENOUGH_CUDA_DEVICES

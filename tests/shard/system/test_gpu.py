"""What is computed alike on every device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lorikeet.shard.attention.reference import quantize
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.kernels.integer import round_blocks
from lorikeet.shard.model.quantization.integers import round_weight
from lorikeet.shard.ranks.leader import device_of
from lorikeet.shard.system import gpu


class Divisions(TorchDispatchMode):
    """Notes what tensors are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.div:
            self.divisors.append(args[1])
        return func(*args, **(kwargs or {}))


def test_quotients_are_correctly_rounded() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    quotients = gpu.divide(x, 448.0)
    assert torch.equal(quotients, (x.double() / 448.0).float())
    assert not torch.equal(quotients, x * (1 / 448.0))


@pytest.mark.parametrize("to_8_bits", [quantize, round_blocks, lambda x: round_weight(x, 8)])
def test_scales_are_not_divided_by_numbers(to_8_bits: Callable[[torch.Tensor], Any]) -> None:
    """On CUDA torch would multiply by the reciprocal: the scales, and values halfway between two, would differ."""
    with Divisions() as seen:
        to_8_bits(torch.randn(3, 32))
    assert seen.divisors and all(isinstance(divisor, torch.Tensor) and divisor.dim() for divisor in seen.divisors)


def test_a_device_without_a_number_is_the_first() -> None:
    config = ShardConfig("tiny", "/nowhere", "unix:/dev/null", device="cuda", num_ranks=2)
    assert [device_of(config, rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert ShardConfig.from_dict({"model_id": "", "model_path": "", "listen": "", "device": "cuda"}).device == "cuda:0"

"""Which fused modules replace which modules of a network: the one decision about it, for every device.

A fused module computes what the module that it replaces computes, in fewer calls. `auto` takes the device's kernels:
compiled C for bfloat16 on CPU, Triton elsewhere. `device` takes Triton everywhere, for tests in its interpreter.
Weights that were rounded at load have compiled C of their own.
"""

from dataclasses import dataclass

import torch
from torch import nn

from lorikeet.shard.model.fusion.attention import fuse_attention
from lorikeet.shard.model.fusion.kernels import CpuKernels, CudaKernels, FusionKernels, IntegerKernels
from lorikeet.shard.model.fusion.layer import connect_layers, fuse_layer
from lorikeet.shard.model.fusion.parts import fuse_mlp, fuse_norm
from lorikeet.shard.model.kernels import cpu, integer
from lorikeet.shard.model.quantization.integers import rounding_of
from lorikeet.shard.model.rotary import rotary_width

CHOICES = ("auto", "none", "device")


@dataclass(frozen=True)
class Fusion:
    """Makes the fused modules of one network."""

    kernels: FusionKernels
    shared: set[int]
    """Ids of weights that more than one module holds."""
    rotary_width: int | None = None

    def fuse_module(self, module: nn.Module) -> nn.Module | None:
        """The fused part of a layer, or None."""
        fused = fuse_norm(module, self.kernels) or fuse_mlp(module, self.kernels, self.shared)
        return fused or fuse_attention(module, self.kernels, self.shared, self.rotary_width)

    def place(self, network: nn.Module) -> None:
        """Replace parts, then the layers made of them; what only the replaced modules held is dropped."""
        self._replace(network)
        if not self.kernels.compiles_layers:
            connect_layers(network)

    def _replace(self, parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            fused = self.fuse_module(child)
            if fused is None:
                self._replace(child)
                fused = fuse_layer(child, self.kernels)
            if fused is not None:
                _copy_attributes(child, fused)
                setattr(parent, name, fused)


def choose(
    fusions: str, network: nn.Module, device: torch.device, dtype: torch.dtype, shared: set[int]
) -> Fusion | None:
    """How to fuse `network`, None for not at all. `shared`: ids of weights that more than one module holds. Raises
    ValueError for an unknown choice, and for kernels that are not available.
    """
    if fusions not in CHOICES:
        raise ValueError(f"unknown fusions {fusions!r}; known: {', '.join(CHOICES)}")
    if fusions == "none":
        return None
    if rounding_of(network) is not None and device.type == "cpu":
        can_fuse = dtype == torch.bfloat16 and integer.available()
        return Fusion(IntegerKernels(), shared, rotary_width(network)) if can_fuse else None
    if fusions == "device" or device.type != "cpu":
        return Fusion(CudaKernels(), shared, rotary_width(network))
    if dtype == torch.bfloat16 and cpu.available():
        return Fusion(CpuKernels(), shared, rotary_width(network))
    return None


def _copy_attributes(plain: nn.Module, fused: nn.Module) -> None:
    """Copy what the model's code may read from the plain module, such as the kind of a layer."""
    for name, value in vars(plain).items():
        if isinstance(value, bool | int | float | str) and not hasattr(fused, name):
            setattr(fused, name, value)

"""Which fused twins take the place of which modules: the one decision about it, for every device.

A twin computes what the module it replaces does, in fewer steps. `auto` takes those of the device: compiled C for
bfloat16 on CPU, Triton elsewhere. `device` takes those of devices on any, for tests in Triton's interpreter.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from lorikeet.shard.model.fusion import (
    cpu_attention as fused_attention,
)
from lorikeet.shard.model.fusion import (
    cpu_layer as fused_layer,
)
from lorikeet.shard.model.fusion import (
    cpu_parts as fusion,
)
from lorikeet.shard.model.kernels import cpu as kernels
from lorikeet.shard.model.rotary import rotary_width

CHOICES = ("auto", "none", "device")


class FusionBackend(Protocol):
    """What makes twins."""

    def of_part(self, module: nn.Module) -> nn.Module | None:
        """The twin of a part of a layer, None where it has none."""

    def of_layer(self, layer: nn.Module) -> nn.Module | None:
        """The twin of a layer whose parts' twins are in place."""

    def link(self, network: nn.Module) -> None:
        """Join what twins of different layers do, once all are in place."""


@dataclass(frozen=True)
class CpuFusion:
    """Compiled C, bfloat16."""

    shared: set[int]
    rotary_width: int | None

    def of_part(self, module: nn.Module) -> nn.Module | None:
        twin = fusion.fuse(module, self.shared)
        return twin or fused_attention.fuse_attention(module, self.shared, self.rotary_width)

    def of_layer(self, layer: nn.Module) -> nn.Module | None:
        return fused_layer.fuse_layer(layer)

    def link(self, network: nn.Module) -> None:
        """A layer is one call; nothing is done across."""


class CudaFusion:
    """Triton, any number format."""

    def __init__(self, shared: set[int], rotary_width: int | None) -> None:
        """Raises ValueError without triton."""
        try:
            from lorikeet.shard.model.fusion import (
                cuda_attention as device_attention,
            )
            from lorikeet.shard.model.fusion import (
                cuda_layer as device_layer,
            )
            from lorikeet.shard.model.fusion import (
                cuda_parts as device_parts,
            )
        except ImportError as missing:
            reason = "fused kernels need triton, which cannot be imported; --disable-custom-kernels runs without them"
            raise ValueError(f"{reason}: {missing}") from missing
        self._attention, self._layer, self._parts = device_attention, device_layer, device_parts
        self.shared, self.rotary_width = shared, rotary_width

    def of_part(self, module: nn.Module) -> nn.Module | None:
        twin = self._parts.fuse_norm(module) or self._parts.fuse_mlp(module, self.shared)
        return twin or self._attention.fuse_attention(module, self.shared, self.rotary_width)

    def of_layer(self, layer: nn.Module) -> nn.Module | None:
        return self._layer.fuse_layer(layer)

    def link(self, network: nn.Module) -> None:
        self._layer.link(network)


def choose(
    fusions: str, network: nn.Module, device: torch.device, dtype: torch.dtype, shared: set[int]
) -> FusionBackend | None:
    """Whose twins `network` is to have, None for nobody's. `shared`: ids of weights that more than one module holds.
    Raises ValueError for an unknown choice, and where there is none of what was chosen.
    """
    if fusions not in CHOICES:
        raise ValueError(f"unknown fusions {fusions!r}; known: {', '.join(CHOICES)}")
    if fusions == "none":
        return None
    if fusions == "device" or device.type != "cpu":
        return CudaFusion(shared, rotary_width(network))
    if dtype == torch.bfloat16 and kernels.available():
        return CpuFusion(shared, rotary_width(network))
    return None


def place(network: nn.Module, twins: FusionBackend) -> None:
    """Put twins in place of parts, then of layers made of them; what only the replaced modules held is dropped."""
    _place(network, twins)
    twins.link(network)


def _place(parent: nn.Module, twins: FusionBackend) -> None:
    for name, child in list(parent.named_children()):
        twin = twins.of_part(child)
        if twin is None:
            _place(child, twins)
            twin = twins.of_layer(child)
        if twin is not None:
            _keep_facts(child, twin)
            setattr(parent, name, twin)


def _keep_facts(plain: nn.Module, twin: nn.Module) -> None:
    """Let the twin say what its model's code may ask of the plain module, such as the kind of a layer."""
    for name, value in vars(plain).items():
        if isinstance(value, bool | int | float | str) and not hasattr(twin, name):
            setattr(twin, name, value)

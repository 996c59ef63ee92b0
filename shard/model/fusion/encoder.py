"""Layer norms and GELU of encoders in float32 on CPU, alone, or together with the product before them.

As with the other fused modules, parts are found by their usual names, and a fused module is used only if it computes
what the plain one computes. What adapters change is added between product and GELU.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lorikeet.shard.model.adapters.discovery import PackedLinear, target_of
from lorikeet.shard.model.fusion import verify
from lorikeet.shard.model.kernels import float32
from lorikeet.shard.model.kernels.packing import Float32Matrix

_ACTIVATIONS = ("intermediate_act_fn", "activation")
_SAME = 1e-6
"""Largest difference between two computations of GELU."""


class FusedLayerNorm(nn.Module):
    """A layer norm over the last axis."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.epsilon = norm.weight, norm.bias, norm.eps
        self.adapters = target_of(norm)

    def forward(self, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """x, added: [..., H]. Returns the norm of their sum."""
        y = float32.layer_norm(x, added, self.weight, self.bias, self.epsilon)
        return y if self.adapters is None else self.adapters.adapt_norm(y)


class FusedGelu(nn.Module):
    """GELU in its exact form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: any shape."""
        return float32.gelu(x)


class DenseGelu(nn.Module):
    """`gelu(dense x)`."""

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        self.dense: Any = dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Returns [..., out]."""
        dense = self.dense
        is_packed = isinstance(dense, PackedLinear) and isinstance(dense.matrix, Float32Matrix)
        if is_packed and (dense.adapters is None or not len(dense.adapters.rows)):
            made: torch.Tensor = dense.matrix.gelu(x)
            return made
        return float32.gelu(dense(x))


class DenseNorm(nn.Module):
    """`norm(dense x + residual)`."""

    def __init__(self, dense: nn.Module, norm: FusedLayerNorm) -> None:
        super().__init__()
        self.dense, self.norm = dense, norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x: [..., in]; residual: [..., out]. Returns [..., out]."""
        normed: torch.Tensor = self.norm(self.dense(x), residual)
        return normed


def can_fuse(fusions: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this module's parts are used; `fusions` as in `ShardConfig`."""
    return fusions == "auto" and device.type == "cpu" and dtype == torch.float32 and float32.available()


def fuse_encoder(network: nn.Module) -> None:
    """Replace what can be replaced in a network whose linear layers are not packed yet."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)


def _fused(module: Any) -> nn.Module | None:
    if type(module) is nn.LayerNorm:
        return _norm(module)
    if _is_gelu(module):
        return FusedGelu()
    names = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    if names not in ({"dense"}, {"dense", "LayerNorm"}) or not isinstance(module.dense, nn.Linear):
        return None
    dense = module.dense
    x = verify.rows(dense.in_features, dense.weight)
    if names == {"dense"}:
        made = DenseGelu(dense)
        has_gelu = any(_is_gelu(getattr(module, name, None)) for name in _ACTIVATIONS)
        return made if has_gelu and verify.computes_the_same(module, made, x) else None
    norm = module.LayerNorm if isinstance(module.LayerNorm, FusedLayerNorm) else _norm(module.LayerNorm)
    if norm is None or norm.weight.shape[0] != dense.out_features:
        return None
    residual = verify.rows(dense.out_features, dense.weight, mean=1.0)
    fused = DenseNorm(dense, norm)
    return fused if verify.computes_the_same(module, fused, x, residual) else None


def _norm(module: Any) -> FusedLayerNorm | None:
    if type(module) is not nn.LayerNorm or not module.elementwise_affine or len(module.normalized_shape) != 1:
        return None
    return FusedLayerNorm(module) if module.normalized_shape[0] % float32.block_size() == 0 else None


@torch.inference_mode()
def _is_gelu(module: Any) -> bool:
    """Whether a module without weights is GELU in its exact form."""
    if not isinstance(module, nn.Module) or next(module.parameters(), None) is not None or list(module.children()):
        return False
    if "gelu" not in type(module).__name__.lower():
        return False
    x = torch.linspace(-8, 8, 257)
    return bool((module(x) - functional.gelu(x)).abs().max() <= _SAME)

"""Fused RMS norms and gated MLPs: a few calls of a device's kernels in place of a chain of small operators.

No module is chosen by its class: a fused module is made for every module that has the right parts, and it is used only
if it computes what the plain module computes. Weights are the plain module's, or copies that replace them.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from lorikeet.shard.model.adapters.discovery import FusedTargets, target_of
from lorikeet.shard.model.fusion import verify
from lorikeet.shard.model.fusion.kernels import FusionKernels
from lorikeet.shard.model.fusion.patterns import MlpParts, Norm, mlp_parts, norm_of, sample
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.system import comparison

_SAME = 1e-5
"""Largest difference between two computations of the same activation function."""


class FusedNorm(nn.Module):
    """An RMS norm over the last axis, alone or with the sum before it."""

    def __init__(self, kernels: FusionKernels, norm: Norm) -> None:
        super().__init__()
        self._kernels, self.norm = kernels, norm
        # [H]
        self.weight = norm.weight
        self.adapters: LoraTarget | None = None
        """Its adapters, where they may change norms."""
        self._precomputed: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H]."""
        precomputed, self._precomputed = self._precomputed, None
        if precomputed is not None and precomputed[0] is x:
            return precomputed[1]
        return self._adapted(self._kernels.rms_norm(x, self.norm, self.adapters))

    def of_sum(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, added: [..., H]. Returns their sum and the norm of the sum."""
        total, normed = self._kernels.add_rms_norm(x, added, self.norm, self.adapters)
        return total, self._adapted(normed)

    def precompute(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """x, added: [..., H]. Returns their sum, and keeps its norm for the next call if that is with the sum."""
        self._precomputed = self.of_sum(x, added)
        return self._precomputed[0]

    def _adapted(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.adapters is None or self._kernels.adapts_norms else self.adapters.adapt_norm(y)


class FusedMlp(nn.Module):
    """`down(act(gate x) * up x)`."""

    def __init__(self, kernels: FusionKernels, parts: MlpParts, is_tanh: bool) -> None:
        super().__init__()
        groups = [parts.ups] if kernels.joins_gate_and_up else [(part,) for part in parts.ups]
        self._kernels, self.is_tanh = kernels, is_tanh
        self.ups = [kernels.join(group) for group in groups]
        """One matrix for gate and up, or one for each."""
        self.up_adapters = [
            FusedTargets(matrix, [target_of(part) for part in group])
            for matrix, group in zip(self.ups, groups, strict=True)
        ]
        self.down = kernels.output(parts.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H]."""
        if not self.up_adapters[0].is_active and (whole := self._kernels.gated_mlp(x, self)) is not None:
            return whole
        rows = x.reshape(-1, self.ups[0].in_features)
        shrunk = [adapters.begin(rows) for adapters in self.up_adapters]
        products = [matrix(rows) for matrix in self.ups]
        for adapters, product, one in zip(self.up_adapters, products, shrunk, strict=True):
            adapters.adapt(rows, product, one)
        hidden = self._kernels.gate(products, self.is_tanh)
        output: torch.Tensor = self.down(hidden.view(*x.shape[:-1], -1))
        return output


def fuse_norm(module: nn.Module, kernels: FusionKernels) -> FusedNorm | None:
    """The fused norm in the form of `module`, or None where the kernels compute none."""
    norm = norm_of(module)
    if norm is None or not kernels.supports_norm(norm):
        return None
    # forms differ in what they round, and in small weights: the network's own weights may show neither
    drawn = verify.norm_weight(norm.weight)
    differences = []
    for form in kernels.forms:
        fused = FusedNorm(kernels, replace(norm, weight=drawn, form=form))
        shares = verify.norm_differences(module, fused, drawn)
        if shares is None:
            return None
        differences.append(shares)
    nearest = min(range(len(differences)), key=lambda index: float(differences[index].mean()))
    if not comparison.has_same_roundings(differences[nearest], drawn.dtype):
        return None
    chosen = FusedNorm(kernels, replace(norm, form=kernels.forms[nearest]))
    chosen.adapters = target_of(module)
    if chosen.adapters is not None:
        chosen.adapters.is_adapted_inside = kernels.adapts_norms
    return chosen


def fuse_mlp(module: nn.Module, kernels: FusionKernels, shared: set[int]) -> FusedMlp | None:
    """The fused gated MLP, or None. `shared`: ids of weights that other modules hold too."""
    parts = mlp_parts(module, shared)
    is_tanh = None if parts is None else _is_tanh(parts)
    if parts is None or is_tanh is None or not kernels.supports_mlp(parts, is_tanh):
        return None
    fused = FusedMlp(kernels, parts, is_tanh)
    x = verify.rows(parts.ups[0].in_features, sample(parts.ups[0]))
    return fused if verify.computes_the_same(module, fused, x) else None


@torch.inference_mode()
def _is_tanh(parts: MlpParts) -> bool | None:
    """The activation of an MLP: False is SiLU, True GELU's tanh formula, None neither."""
    if parts.activation is None:  # the comparison with the plain module decides
        return False
    x = torch.linspace(-8, 8, 257, device=sample(parts.ups[0]).device)
    activated = parts.activation(x)
    for is_tanh, known in ((False, functional.silu(x)), (True, functional.gelu(x, approximate="tanh"))):
        if (activated - known).abs().max() <= _SAME:
            return is_tanh
    return None

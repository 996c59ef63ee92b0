"""RMS norms and gated MLPs as one call each, where kernels.c computes what the plain module computes.

Which modules those are is not decided by name: a fused twin is made for whatever has the right parts, both compute a
few random rows, and the twin stays only if they agree. Bfloat16 on CPU only.
"""

import torch
from torch import nn

from shard.model import kernels
from shard.model.adapter_sites import JoinedSites, site_of
from shard.model.packing import StreamedMatrix
from shard.model.quantized import is_quantized

TOLERANCE = 2**-6
"""Relative difference that roundings to bfloat16 in another order may leave."""
NUM_TRIAL_ROWS = 8


class FusedNorm(nn.Module):
    """`weight * x / rms(x)` over the last axis."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        """weight: [H] bfloat16, 16 divides H."""
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)  # not a window into a mapped file
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H]."""
        return kernels.rms_norm(x, self.weight, self.epsilon)


class FusedMlp(nn.Module):
    """`down(silu(gate x) * up x)` without biases."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        parts = (gate, up, down)
        self.gate, self.up, self.down = (StreamedMatrix(part.weight.detach(), None) for part in parts)
        matrices = (self.gate, self.up, self.down)
        self.adapters = [JoinedSites(matrix, [site_of(part)]) for matrix, part in zip(matrices, parts, strict=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H]."""
        if self.adapters[0].is_active:
            return self._adapted(x)
        return kernels.gated_mlp(
            x, self.gate.packed, self.up.packed, self.gate.out_features, self.down.packed, self.down.out_features
        )

    def _adapted(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.gate.in_features)
        of_gate, of_up, of_down = self.adapters
        gate, up = self.gate(rows), self.up(rows)
        of_gate.adapt(rows, gate)
        of_up.adapt(rows, up)
        hidden = kernels.silu_times(gate, up)
        y = self.down(hidden)
        of_down.adapt(hidden, y)
        return y.view(*x.shape[:-1], -1)


def fuse(module: nn.Module, shared: set[int]) -> nn.Module | None:
    """The fused twin of `module`, or None where it has none. `shared`: ids of weights that others hold too."""
    parts = _norm_parts(module)
    if parts is not None:
        twin: nn.Module = FusedNorm(*parts)
        return twin if _agree(module, twin, parts[0].shape[0]) else None
    linears = _mlp_parts(module, shared)
    if linears is not None:
        twin = FusedMlp(*linears)
        return twin if _agree(module, twin, linears[0].in_features) else None
    return None


def _norm_parts(module: nn.Module) -> tuple[torch.Tensor, float] | None:
    """(weight, epsilon) of what may be an RMS norm."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter):
        return None
    if weight.dim() != 1 or weight.shape[0] % 16 or getattr(module, "bias", None) is not None:
        return None
    return weight, epsilon


def _mlp_parts(module: nn.Module, shared: set[int]) -> tuple[nn.Linear, nn.Linear, nn.Linear] | None:
    """Gate, up and down of what may be a gated MLP."""
    linears: list[nn.Linear] = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        part = getattr(module, name, None)
        if not isinstance(part, nn.Linear) or is_quantized(part) or getattr(part, "bias", None) is not None:
            return None
        if part.in_features % 2 or id(part.weight) in shared:
            return None
        linears.append(part)
    gate, up, down = linears
    return gate, up, down


def _agree(plain: nn.Module, twin: nn.Module, width: int) -> bool:
    """Whether both give the same for random rows of `width`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TRIAL_ROWS, width, generator=generator).bfloat16()
    with torch.inference_mode():
        wanted, got = plain(x).float(), twin(x).float()
    return bool((wanted - got).abs().max() <= TOLERANCE * wanted.abs().max())

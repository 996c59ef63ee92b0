"""RMS norms and gated MLPs as one call each, where cpu.c computes what the plain module computes.

Which modules those are is not decided by name: a fused twin is made for whatever has the right parts, both compute a
few random rows, and the twin stays only if they agree. Bfloat16 on CPU only.
"""

import torch
from torch import nn

from lorikeet.shard.model.adapters.discovery import FusedTargets, target_of
from lorikeet.shard.model.fusion import verify as trial
from lorikeet.shard.model.fusion.patterns import is_plain, mlp_parts, norm_parts
from lorikeet.shard.model.kernels import cpu as kernels
from lorikeet.shard.model.kernels.packing import StreamedMatrix

_LIKE = torch.empty(0, dtype=torch.bfloat16)


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
        self.adapters = [FusedTargets(matrix, [target_of(part)]) for matrix, part in zip(matrices, parts, strict=True)]

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
    norm, mlp = norm_parts(module), mlp_parts(module, shared)
    if norm is not None and norm.weight.shape[0] % 16 == 0:
        # rows with a mean: without one a wide layer norm does about the same
        return _proved(module, FusedNorm(norm.weight, norm.epsilon), trial.rows(norm.weight.shape[0], _LIKE, mean=1.0))
    if mlp is None or len(mlp.ups) != 2 or not is_plain(mlp.down, shared):
        return None
    linears = (*mlp.ups, mlp.down)
    if any(getattr(part, "bias", None) is not None or part.in_features % 2 for part in linears):
        return None
    return _proved(module, FusedMlp(*linears), trial.rows(linears[0].in_features, _LIKE))


def _proved(plain: nn.Module, twin: nn.Module, x: torch.Tensor) -> nn.Module | None:
    """The twin, if it makes of x what the plain module makes of it."""
    return twin if trial.difference(plain, twin, x) <= trial.TOLERANCES[torch.bfloat16] else None

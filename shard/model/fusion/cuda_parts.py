"""Norms and gated MLPs on CUDA as few launches each: device_kernels.py in place of a chain of small operators.

As on the CPU nothing is decided by name: a twin is made of whatever has the right parts and stays only if it computes
what the plain module does. Weights are the plain module's own, or joined out of them and dropped there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from lorikeet.shard.model.adapters.discovery import FusedTargets, target_of
from lorikeet.shard.model.fusion import verify as trial
from lorikeet.shard.model.fusion.patterns import MlpParts, NormParts, joined_bias, mlp_parts, norm_parts
from lorikeet.shard.model.kernels import triton as device_kernels
from lorikeet.shard.model.kernels.packing import PackedMatrix

_SAME = 1e-5
"""So far apart two activations may be that are the same function."""


class NormForm(NamedTuple):
    """How a norm's weight comes in."""

    offset: float
    """Added to the weight."""
    rounds: bool
    """Whether the number format's rounding comes before the weight too."""


FORMS = (NormForm(0.0, True), NormForm(0.0, False), NormForm(1.0, False))
"""Llama's, OLMo's, Gemma's."""


class FusedMatrix(PackedMatrix):
    """The weights of several linear layers with one input as one plain matrix."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        """Of one layer it keeps the weight as it is, of several a copy."""
        weights = [part.weight.detach() for part in parts]
        # [out of all, in]
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        # [out of all]
        self.bias = joined_bias(tuple(parts))
        super().__init__(self.weight, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class DeviceNorm(nn.Module):
    """An RMS norm over the last axis, alone or with the sum before it."""

    def __init__(self, parts: NormParts, form: NormForm) -> None:
        super().__init__()
        # [H]
        self.weight = parts.weight
        self.epsilon, self.form = parts.epsilon, form
        self._done: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H]."""
        done, self._done = self._done, None
        if done is not None and done[0] is x:
            return done[1]
        return device_kernels.rms_norm(x, self.weight, self.epsilon, *self.form)

    def of_sum(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, added: [..., H]. Returns their sum and the norm of it."""
        return device_kernels.add_rms_norm(x, added, self.weight, self.epsilon, *self.form)

    def ahead(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """x, added: [..., H]. Returns their sum; if that is what the norm is called with next, it is done already."""
        self._done = self.of_sum(x, added)
        return self._done[0]


class DeviceMlp(nn.Module):
    """`down(act(gate x) * up x)`, gate and up as one product."""

    def __init__(self, parts: MlpParts, is_tanh: bool) -> None:
        super().__init__()
        self.down = parts.down
        self.up = FusedMatrix(parts.ups)
        self.up_adapters = FusedTargets(self.up, [target_of(part) for part in parts.ups])
        self.is_tanh = is_tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H]."""
        rows = x.reshape(-1, self.up.in_features)
        # [rows, 2 hidden]
        both = self.up(rows)
        self.up_adapters.adapt(rows, both)
        hidden = device_kernels.gate(both, self.is_tanh)
        output: torch.Tensor = self.down(hidden.view(*x.shape[:-1], -1))
        return output


def fuse_norm(module: nn.Module) -> DeviceNorm | None:
    """The twin of a norm in the form that comes closest, or None where it is no RMS norm."""
    parts = norm_parts(module)
    if parts is None:
        return None
    # rows with a mean: without one a wide layer norm does about the same
    x = trial.rows(parts.weight.shape[0], parts.weight, mean=1.0)
    twins = [DeviceNorm(parts, form) for form in FORMS]
    apart = [trial.difference(module, twin, x) for twin in twins]
    nearest = min(range(len(twins)), key=lambda index: apart[index])
    return twins[nearest] if apart[nearest] <= trial.TOLERANCES[x.dtype] else None


def fuse_mlp(module: nn.Module, shared: set[int]) -> DeviceMlp | None:
    """The twin of a gated MLP, or None where it has none. `shared`: weights that others hold too."""
    parts = mlp_parts(module, shared)
    is_tanh = None if parts is None else _is_tanh(parts)
    if parts is None or is_tanh is None:
        return None
    twin = DeviceMlp(parts, is_tanh)
    x = trial.rows(twin.up.in_features, twin.up.weight)
    return twin if trial.difference(module, twin, x) <= trial.TOLERANCES[x.dtype] else None


@torch.inference_mode()
def _is_tanh(parts: MlpParts) -> bool | None:
    """Which of the activations that there are the MLP has: False is SiLU, True GELU's tanh formula, None neither."""
    if parts.activation is None:
        return None
    x = torch.linspace(-8, 8, 257, device=parts.ups[0].weight.device)
    found = parts.activation(x)
    for is_tanh, known in ((False, functional.silu(x)), (True, functional.gelu(x, approximate="tanh"))):
        if (found - known).abs().max() <= _SAME:
            return is_tanh
    return None

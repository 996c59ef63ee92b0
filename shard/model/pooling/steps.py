"""What sentence-transformers' modules do after the pooling: Dense layers and normalisation."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from lorikeet.proto.pooling import NORMALIZE
from lorikeet.shard.model.adapters.discovery import PackedLinear
from lorikeet.shard.model.kernels.packing import can_pack, pack

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU, "Sigmoid": nn.Sigmoid,
}  # fmt: skip


class Dense(nn.Module):
    """A linear layer with an activation function, and perhaps a residual connection."""

    def __init__(self, settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Raises ValueError for an activation function that is not served."""
        super().__init__()
        name = str(settings.get("activation_function") or "Identity").rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise ValueError(f"the activation function {name} of a Dense module is not served")
        if settings.get("module_input_name", "sentence_embedding") != "sentence_embedding":
            raise ValueError("a Dense module of token embeddings is not served")
        self.linear = _linear(weights["linear.weight"], weights.get("linear.bias"))
        self.activation = _ACTIVATIONS[name]()
        self.has_residual = bool(settings.get("use_residual"))
        residual = weights.get("residual.weight")
        self.residual = nn.Identity() if residual is None else _linear(residual, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [S, in]. Returns [S, out]."""
        y: torch.Tensor = self.activation(self.linear(x))
        return y + self.residual(x) if self.has_residual else y


class Normalize(nn.Module):
    """Divides each row by its length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [S, size]."""
        return nn.functional.normalize(x.float(), dim=-1)


def load_step(folder: Path, step: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """One of the steps of `PooledModel`. Raises ValueError or OSError for files that cannot be served."""
    if step == NORMALIZE:
        return Normalize()
    settings = json.loads((folder / step / "config.json").read_bytes())
    plain = folder / step / "model.safetensors"
    older = folder / step / "pytorch_model.bin"
    weights = load_file(plain) if plain.is_file() else torch.load(older, map_location="cpu", weights_only=True)
    return Dense(settings, {name: weight.to(device, dtype) for name, weight in weights.items()}).requires_grad_(False)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(pack(weight, bias))
    num_out, num_in = weight.shape
    linear = nn.Linear(num_in, num_out, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear

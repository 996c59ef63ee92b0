"""Rotary position tables that do not depend on the other requests of a step.

transformers selects some tables by the longest position in its input row; our rows hold many requests, so the choice is
made once, at startup.
"""

import inspect
from typing import Any

import torch
from torch import nn


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once by the model's code: otherwise a fiftieth of a small step."""

    def __init__(self, rotary: nn.Module, num_positions: int, like: torch.Tensor) -> None:
        """`like`: any tensor of the dtype and on the device of the hidden states."""
        super().__init__()
        positions = torch.arange(num_positions, device=like.device)[None]
        with torch.inference_mode():
            # [2, num_positions, D] cos and sin, in one tensor for one launch
            self.table = torch.cat(rotary(like, position_ids=positions))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids: [1, T]. Returns cos and sin, [1, T, D] each."""
        cos, sin = self.table.index_select(1, position_ids[0]).split(1)
        return cos, sin


def tabulate_rotary(network: nn.Module, num_positions: int, like: torch.Tensor) -> None:
    """Replace every rotary embedding that depends on the position alone by a table."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(getattr(child, "inv_freq", None), torch.Tensor) and _takes_positions_alone(child):
                setattr(parent, name, RotaryTable(child, num_positions, like))


def rotary_width(network: nn.Module) -> int | None:
    """Elements of a head that are rotated; None where modules differ."""
    widths = {int(module.table.shape[2]) for module in network.modules() if isinstance(module, RotaryTable)}
    frequencies = (getattr(module, "inv_freq", None) for module in network.modules())
    widths |= {2 * tensor.numel() for tensor in frequencies if isinstance(tensor, torch.Tensor)}
    return widths.pop() if len(widths) == 1 else None


def _takes_positions_alone(rotary: nn.Module) -> bool:
    """And not, for instance, the layer's kind."""
    return list(inspect.signature(rotary.forward).parameters) == ["x", "position_ids"]


def fix_rotary(text_config: Any, max_total_tokens: int) -> str:
    """Select one factor set of longrope by the longest request allowed: `long` or `short`; "" for other models. Raises
    ValueError for dynamic tables.
    """
    selected = ""
    for parameters in _parameter_sets(getattr(text_config, "rope_parameters", None)):
        kind = parameters.get("rope_type", "default")
        if "dynamic" in kind:
            raise ValueError("its rotary table (dynamic NTK) depends on the longest request of a batch")
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", text_config.max_position_embeddings
            )
            selected = "long" if max_total_tokens > original else "short"
            parameters["short_factor"] = parameters["long_factor"] = list(parameters[f"{selected}_factor"])
    return selected


def _parameter_sets(rope_parameters: Any) -> list[dict[str, Any]]:
    """One set for all layers, or one per kind of layer."""
    if not rope_parameters:
        return []
    if "rope_type" in rope_parameters or "rope_theta" in rope_parameters:
        return [rope_parameters]
    return [parameters for parameters in rope_parameters.values() if isinstance(parameters, dict)]

"""Rotary position tables that do not depend on what else is in a step.

transformers picks some tables by the longest position in the row it sees; our rows hold many requests, so the choice
is made once, at start.
"""

from typing import Any


def fix_rotary(text_config: Any, max_total_tokens: int) -> None:
    """Leave one factor set of longrope, by the longest request allowed. Raises ValueError for dynamic tables."""
    for parameters in _parameter_sets(getattr(text_config, "rope_parameters", None)):
        kind = parameters.get("rope_type", "default")
        if "dynamic" in kind:
            raise ValueError("its rotary table (dynamic NTK) depends on the longest neighbour in a batch")
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", text_config.max_position_embeddings
            )
            chosen = parameters["long_factor" if max_total_tokens > original else "short_factor"]
            parameters["short_factor"] = parameters["long_factor"] = list(chosen)


def _parameter_sets(rope_parameters: Any) -> list[dict[str, Any]]:
    """One set for all layers, or one per kind of layer."""
    if not rope_parameters:
        return []
    if "rope_type" in rope_parameters or "rope_theta" in rope_parameters:
        return [rope_parameters]
    return [parameters for parameters in rope_parameters.values() if isinstance(parameters, dict)]

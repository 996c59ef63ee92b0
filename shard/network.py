"""What the step loop needs of a model."""

from typing import Protocol

import torch

from shard.batch import StepInputs


class Network(Protocol):
    """Fill `inputs`, call `forward`."""

    inputs: StepInputs

    def forward(self) -> torch.Tensor:
        """Logits of `inputs.logits_rows`: [S, V] float32."""
        ...

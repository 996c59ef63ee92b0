"""What the step loop needs of a model."""

from typing import Protocol

import torch

from lorikeet.shard.batch.inputs import StepInputs


class RankDesync(RuntimeError):
    """A step failed on one of several ranks: the others are at another place by now, and nothing can be computed
    together any more.
    """


class Network(Protocol):
    """Fill `inputs`, call `forward`."""

    inputs: StepInputs

    def forward(self) -> torch.Tensor:
        """Logits of `inputs.logits_rows`: [S, V] float32."""
        ...

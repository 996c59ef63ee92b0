"""What an attention backend is: it keeps K and V in pages and lets a step's queries see them.

A backend is told once per step which segments come, then called once per layer. Knows nothing of the model around it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lorikeet.shard.batch.inputs import StepInputs


@dataclass(frozen=True)
class AttentionSpec:
    """What is fixed about one layer's attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    """A token sees this many newest tokens, itself included; None sees all."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    # [num_heads] logit of a column that takes attention but has no value, or None
    sinks: torch.Tensor | None = None
    # [num_heads] score is lowered by slope times distance, or None
    alibi_slopes: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads that share one K and V head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Region:
    """The pages of one layer's K or V, one after another in the memory of this process."""

    address: int
    page_bytes: int


class LayerKV:
    """K and V of one layer, all pages, in the layout of the backend that made it."""

    def fresh_regions(self) -> list[Region]:
        """Memory that the system gives only when it is first written."""
        return []


@dataclass(frozen=True)
class NativeAttention:
    """One layer's attention for the step at hand, as compiled code calls it. Good until the next `prepare`."""

    function: int
    """Address of a function (layer, step, query, key, value, six strides, output, number of threads)."""
    layer: int
    step: int
    num_tokens: int
    """T."""


class AttentionBackend(ABC):
    """One way to compute attention over paged K and V."""

    page_size: int
    kv_dtype: torch.dtype | None = None
    """What K and V are kept in; None is what the model computes in. With another one each token's head has a scale."""
    can_capture: bool = False
    """Whether a forward under `StepInputs.bounds` reads and launches what follows from these alone."""

    def page_bytes(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """Bytes that one page takes in one layer, `dtype` is what the model computes in."""
        head = (spec.key_dim + spec.value_dim) * (self.kv_dtype or dtype).itemsize
        scales = 0 if self.kv_dtype is None else 2 * torch.float32.itemsize
        return spec.num_kv_heads * (head + scales) * self.page_size

    def unsupported_reason(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        """What of a layer it does not have there; empty if it has all."""
        return ""

    @abstractmethod
    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        """Memory for `num_pages` pages of one layer."""

    @abstractmethod
    def prepare(self, inputs: StepInputs) -> None:
        """Called once per step, after `inputs` was filled and before the first layer."""

    @abstractmethod
    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the step's K and V, then attend.

        query: [T, num_heads, key_dim], key: [T, num_kv_heads, key_dim], value: [T, num_kv_heads, value_dim].
        Returns [T, num_heads, value_dim].
        """

    def native(self, kv: LayerKV) -> NativeAttention | None:
        """How other compiled code calls `attend` without coming back to Python; None where that is not possible."""
        return None

"""The interface of an attention backend, which keeps K and V in pages and computes a step's queries over them.

A backend gets the segments once per step, then one call per layer. Backends share the usual layout of pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.padding import Bounds


@dataclass(frozen=True)
class AttentionSpec:
    """The fixed parameters of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    """A token sees this many newest tokens, itself included; None sees all. Without `is_causal` as many after it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""
    # [num_heads] logit of a column that takes attention but has no value, or None
    sinks: torch.Tensor | None = None
    # [num_heads] score is lowered by slope times distance, or None
    alibi_slopes: torch.Tensor | None = None
    is_causal: bool = True
    """Whether a token sees no later ones. Otherwise each step computes whole requests."""

    @property
    def group(self) -> int:
        """Query heads that share one K and V head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Region:
    """The pages of one layer's K or V, contiguous in the memory of this process."""

    address: int
    page_bytes: int


class LayerKV:
    """K and V of one layer, all pages, in the layout of the backend that made it."""

    def fresh_regions(self) -> list[Region]:
        """Memory that the system provides only when it is first written."""
        return []


class PagedKV(LayerKV):
    """The usual layout: the tokens of a page are contiguous, and so are the heads of a token."""

    def __init__(
        self, spec: AttentionSpec, pages: tuple[int, int], dtype: torch.dtype, on: torch.device, has_scales: bool
    ) -> None:
        """pages: their number and size, N and P."""
        shape = (*pages, spec.num_kv_heads)
        # [N, P, num_kv_heads, key_dim]
        self.keys = torch.zeros(*shape, spec.key_dim, dtype=dtype, device=on)
        # [N, P, num_kv_heads, value_dim]
        self.values = torch.zeros(*shape, spec.value_dim, dtype=dtype, device=on)
        # [N, P, num_kv_heads] float32 factor of each token's head, with K and V in eight bits
        self.key_scales = torch.ones(shape, device=on) if has_scales else None
        self.value_scales = torch.ones(shape, device=on) if has_scales else None
        # [num_heads] float32, contiguous, for kernels
        self.sinks = None if spec.sinks is None else spec.sinks.detach().to(on, torch.float32).contiguous()
        self.slopes = None if spec.alibi_slopes is None else spec.alibi_slopes.to(on, torch.float32).contiguous()


@dataclass(frozen=True)
class KvDestination:
    """Where the K and V of a step go."""

    # [T] page id * P + offset in page
    slots: torch.Tensor
    # [N, P, num_kv_heads, dim] each, in the dtype of the model
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class NativeStep:
    """The attention of the current step, to be called by compiled code. Valid until the next `prepare`."""

    function: int
    """Address of a function (layer, step, query, key, value, six strides, output, number of threads)."""
    address: int
    """Of the step."""
    num_tokens: int
    """T."""


class AttentionBackend(ABC):
    """One way to compute attention over paged K and V."""

    page_size: int
    kv_dtype: torch.dtype | None = None
    """Format of K and V in pages, with a scale per token and head; None is the model's dtype, without scales."""
    can_capture: bool = False
    """Whether a forward under `StepInputs.bounds` depends, in what it reads and launches, on these bounds alone."""

    can_add_accepted: bool = False
    """Whether `prepare` moves segments by the drafts that the device accepted (`Segment.num_uncertain`)."""

    @property
    def parts(self) -> "Sequence[AttentionBackend]":
        """The backends whose kernels it launches, each of which can compute every step by itself."""
        return (self,)

    def page_bytes(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        """Bytes of one page in one layer of a model that computes in `dtype`."""
        head = (spec.key_dim + spec.value_dim) * (self.kv_dtype or dtype).itemsize
        scales = 0 if self.kv_dtype is None else 2 * torch.float32.itemsize
        return spec.num_kv_heads * (head + scales) * self.page_size

    def unsupported_reason(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str:
        """Why this backend cannot compute a layer on a device; empty if it can."""
        return ""

    def allocate(self, spec: AttentionSpec, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerKV:
        """Memory for `num_pages` pages of one layer."""
        pages = (num_pages, self.page_size)
        return PagedKV(spec, pages, self.kv_dtype or dtype, device, has_scales=self.kv_dtype is not None)

    def num_numbers(self, bounds: Bounds) -> int:
        """Most int32 numbers that `prepare` adds to the arrays of a step of these bounds."""
        return 0

    @abstractmethod
    def prepare(self, inputs: StepInputs) -> None:
        """Called once per step, after `inputs` was filled and before it is sent. What the kernels read on the device is
        added to `inputs.upload`.
        """

    @abstractmethod
    def attend(
        self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the step's K and V, then attend.

        query: [T, num_heads, key_dim], key: [T, num_kv_heads, key_dim], value: [T, num_kv_heads, value_dim].
        Returns [T, num_heads, value_dim].
        """

    def destination(self, kv: LayerKV) -> KvDestination | None:
        """Where a kernel may write the step's K and V, to call `read` in place of `attend`; None if it may not."""
        return None

    def read(self, spec: AttentionSpec, kv: LayerKV, query: torch.Tensor) -> torch.Tensor:
        """`attend` of a step whose K and V are stored already, of backends with a `destination`."""
        raise NotImplementedError

    def native_step(self) -> NativeStep | None:
        """How compiled code calls `attend` without returning to Python; None if it cannot."""
        return None

    def native_layer(self, kv: LayerKV) -> int:
        """Address of the layer that the function of `native_step` gets. Valid as long as `kv`."""
        raise NotImplementedError

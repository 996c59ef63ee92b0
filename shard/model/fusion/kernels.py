"""What computes fused modules: compiled C for bfloat16 on CPU, Triton elsewhere, behind one interface.

Both compute what transformers' plain modules compute, with sums in float32 and results rounded where the plain modules
round. `supports_*` state what the kernels require; whether a fused module is used is decided by comparing it with the
plain one (verify.py).
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from lorikeet.shard.attention.base import KvDestination
from lorikeet.shard.model.adapters.discovery import PackedLinear, target_of
from lorikeet.shard.model.fusion.patterns import FORMS, AttentionParts, MlpParts, Norm, NormForm, joined_bias
from lorikeet.shard.model.fusion.verify import PositionEmbeddings
from lorikeet.shard.model.kernels import cpu, integer
from lorikeet.shard.model.kernels.packing import PackedMatrix, StreamedMatrix
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.model.quantization.integers import IntegerLinear, IntegerMatrix

HeadNorms = tuple[Norm, Norm] | None
"""Norms of each head of q and of k, alike but for their weights."""


class FusionKernels(Protocol):
    """The kernels of one device, and the modules that they compute."""

    forms: Sequence[NormForm] = FORMS
    """Forms of the norms that the kernels compute."""
    joins_gate_and_up: bool = True
    """Whether gate and up are one product."""
    keeps_outputs: bool = False
    """Whether `output` returns the module that it is given."""
    adapts_norms: bool = False
    """Whether norms read what adapters change in their output. Others are changed after the norm."""
    stores_kv: bool = False
    """Whether `rotate` can write K and V to their pages."""
    compiles_layers: bool = False
    """Whether a decoder layer of fused parts is one call."""

    def supports_norm(self, norm: Norm) -> bool:
        return True

    def supports_mlp(self, parts: MlpParts, is_tanh: bool) -> bool:
        return True

    def supports_attention(self, parts: AttentionParts, rotary_width: int | None) -> bool:
        return True

    def join(self, parts: Sequence[Any]) -> PackedMatrix:
        """The weights of linear layers with one input as one matrix."""

    def output(self, part: nn.Module) -> nn.Module:
        """The module to use in place of the last product of a block."""
        return part

    def rms_norm(self, x: Tensor, norm: Norm, adapters: LoraTarget | None = None) -> Tensor:
        """x: [..., H]; adapters: of the norm, of kernels that adapt norms."""

    def add_rms_norm(
        self, x: Tensor, added: Tensor, norm: Norm, adapters: LoraTarget | None = None
    ) -> tuple[Tensor, Tensor]:
        """x, added: [..., H]. Returns their sum, rounded, and the norm of the sum."""

    def gate(self, products: Sequence[Tensor], is_tanh: bool) -> Tensor:
        """products: [rows, n] gate and up, or both as one [rows, 2 n]. Returns `silu(gate) * up`, or with GELU's tanh
        formula: [rows, n].
        """

    def rotate(
        self, qkv: Tensor, angles: PositionEmbeddings, shape: list[int], norms: HeadNorms, into: KvDestination | None
    ) -> None:
        """Apply the norms of q's and k's heads, if any, then the rotary positions, in place. qkv: [T, columns]; shape:
        heads of q, heads of k, width of a head. With `into`, which is where k and v go, of q alone in place.
        """

    def gated_mlp(self, x: Tensor, mlp: Any) -> Tensor | None:
        """A FusedMlp without adapters as one call; None where there is no such call."""
        return None


class CpuKernels(FusionKernels):
    """Compiled C (cpu.c), bfloat16."""

    joins_gate_and_up = False
    compiles_layers = True
    code: ModuleType = cpu
    """Has the kernels between products, and the decoder layer."""

    def supports_norm(self, norm: Norm) -> bool:
        return norm.weight.dtype == torch.bfloat16 and norm.weight.shape[0] % 16 == 0

    def supports_mlp(self, parts: MlpParts, is_tanh: bool) -> bool:
        if len(parts.ups) != 2 or not parts.has_plain_output:
            return False
        linears: tuple[Any, ...] = (*parts.ups, parts.down)
        return self._can_multiply(*linears) and all(part.bias is None for part in linears)

    def supports_attention(self, parts: AttentionParts, rotary_width: int | None) -> bool:
        if len(parts.qkv) != 3 or not parts.has_plain_output:
            return False
        is_whole = rotary_width in (None, parts.head_dim)
        return is_whole and parts.head_dim % 32 == 0 and self._can_multiply(*parts.qkv, parts.out)

    def join(self, parts: Sequence[Any]) -> PackedMatrix:
        return StreamedMatrix(torch.cat([part.weight.detach() for part in parts]), joined_bias(parts))

    def output(self, part: Any) -> nn.Module:
        return PackedLinear(self.join([part]), target_of(part))

    def rms_norm(self, x: Tensor, norm: Norm, adapters: LoraTarget | None = None) -> Tensor:
        made: Tensor = self.code.rms_norm(x, described_norm(norm))
        return made

    def add_rms_norm(
        self, x: Tensor, added: Tensor, norm: Norm, adapters: LoraTarget | None = None
    ) -> tuple[Tensor, Tensor]:
        sums = x + added
        return sums, self.rms_norm(sums, norm)

    def gate(self, products: Sequence[Tensor], is_tanh: bool) -> Tensor:
        made: Tensor = self.code.gate_times(*products, is_tanh)
        return made

    def rotate(
        self, qkv: Tensor, angles: PositionEmbeddings, shape: list[int], norms: HeadNorms, into: KvDestination | None
    ) -> None:
        num_heads, num_kv_heads, head_dim = shape
        if norms is not None:
            self.code.norm_heads(qkv, 0, num_heads, head_dim, described_norm(norms[0]))
            self.code.norm_heads(qkv, num_heads, num_kv_heads, head_dim, described_norm(norms[1]))
        self.code.rotate(qkv, num_heads + num_kv_heads, *contiguous(angles))

    def gated_mlp(self, x: Tensor, mlp: Any) -> Tensor | None:
        (gate, up), down = mlp.ups, mlp.down.matrix
        outputs = (down.packed, down.out_features)
        return cpu.gated_mlp(x, gate.packed, up.packed, gate.out_features, *outputs, mlp.is_tanh)

    def describe(self, layer: cpu.DecoderLayer, matrices: Mapping[str, Any]) -> None:
        """Enter the matrices of a decoder layer."""
        for name, matrix in matrices.items():
            setattr(layer, name, address_of(matrix.packed))

    def _can_multiply(self, *parts: Any) -> bool:
        """Whether the code can multiply by the weights of these linear layers."""
        return all(
            isinstance(part, nn.Linear) and part.weight.dtype == torch.bfloat16 and part.in_features % 2 == 0
            for part in parts
        )


class IntegerKernels(CpuKernels):
    """Compiled C (integer.c) for rounded weights, on any processor, bfloat16."""

    code = integer

    def join(self, parts: Sequence[Any]) -> PackedMatrix:
        return _joined_integers(parts)

    def gated_mlp(self, x: Tensor, mlp: Any) -> Tensor | None:
        return None

    def describe(self, layer: cpu.DecoderLayer, matrices: Mapping[str, Any]) -> None:
        for name, matrix in matrices.items():
            setattr(layer, name, matrix.packed.address)
        layer.row_bytes = max(matrix.packed.row_bytes for matrix in matrices.values())

    def _can_multiply(self, *parts: Any) -> bool:
        """Whether a kernel multiplies these matrices; those with one input must round it alike."""
        return isinstance(parts[-1], IntegerLinear) and _are_alike(parts[:-1])


def _are_alike(parts: Sequence[Any]) -> bool:
    """Whether all are rounded, and alike."""
    return all(isinstance(part, IntegerLinear) for part in parts) and len({part.integers_kind for part in parts}) == 1


def _joined_integers(parts: Sequence[Any]) -> IntegerMatrix:
    """Rounded weights of linear layers with one input as one matrix."""
    first = parts[0]
    if len(parts) > 1:
        weight = first.integers.joined([part.integers for part in parts[1:]])
        first = IntegerLinear(weight, joined_bias(parts), first.rounds_activations, first.sample.dtype)
    matrix = IntegerMatrix(first, first.sample.dtype)
    matrix.copy_from_mmap()
    return matrix


class CudaKernels(FusionKernels):
    """Triton, any number format."""

    keeps_outputs = True
    adapts_norms = True
    stores_kv = True

    def __init__(self) -> None:
        """Raises ValueError without triton."""
        try:
            from lorikeet.shard.model.kernels import triton
        except ImportError as missing:
            reason = "fused kernels need triton, which cannot be imported; --disable-custom-kernels runs without them"
            raise ValueError(f"{reason}: {missing}") from missing
        self._triton = triton

    def supports_mlp(self, parts: MlpParts, is_tanh: bool) -> bool:
        return self._can_join(parts.ups)

    def supports_attention(self, parts: AttentionParts, rotary_width: int | None) -> bool:
        return self._can_join(parts.qkv)

    def join(self, parts: Sequence[Any]) -> PackedMatrix:
        return _joined_integers(parts) if isinstance(parts[0], IntegerLinear) else FusedMatrix(parts)

    def _can_join(self, parts: Sequence[Any]) -> bool:
        return _are_alike(parts) or not any(isinstance(part, IntegerLinear) for part in parts)

    def rms_norm(self, x: Tensor, norm: Norm, adapters: LoraTarget | None = None) -> Tensor:
        offset, rounds = norm.form
        slots, table, target = _changes(adapters, x)
        return self._triton.rms_norm(x, norm.weight, norm.epsilon, offset, rounds, slots, table, target)

    def add_rms_norm(
        self, x: Tensor, added: Tensor, norm: Norm, adapters: LoraTarget | None = None
    ) -> tuple[Tensor, Tensor]:
        offset, rounds = norm.form
        slots, table, target = _changes(adapters, x)
        return self._triton.add_rms_norm(x, added, norm.weight, norm.epsilon, offset, rounds, slots, table, target)

    def gate(self, products: Sequence[Tensor], is_tanh: bool) -> Tensor:
        return self._triton.gate(products[0], is_tanh)

    def rotate(
        self, qkv: Tensor, angles: PositionEmbeddings, shape: list[int], norms: HeadNorms, into: KvDestination | None
    ) -> None:
        cos, sin = contiguous(angles)
        slots, keys, values = (None, None, None) if into is None else (into.slots, into.keys, into.values)
        if norms is None:
            self._triton.rotate(qkv, cos, sin, shape, None, None, slots, keys, values, 0.0, 0.0, False)
            return
        query, key = norms
        self._triton.rotate(
            qkv, cos, sin, shape, query.weight, key.weight, slots, keys, values, query.epsilon, query.form.offset,
            query.form.rounds,
        )  # fmt: skip


def _changes(adapters: LoraTarget | None, x: Tensor) -> tuple[Tensor | None, Tensor | None, int]:
    """What a kernel reads of a norm's adapters in the current step: see `Kernels.norm_changes`. x: [..., H]."""
    if adapters is None or adapters.kernels is None or not len(rows := adapters.rows):
        return None, None, 0
    return adapters.kernels.norm_changes(rows, adapters, x.shape[:-1].numel())


class FusedMatrix(PackedMatrix):
    """The weights of several linear layers with one input as one plain matrix."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        """The weight of one layer is kept as it is; those of several are copied."""
        weights = [part.weight.detach() for part in parts]
        # [out of all, in]
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        # [out of all]
        self.bias = joined_bias(parts)
        super().__init__(self.weight)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, self.weight, bias)


def contiguous(angles: PositionEmbeddings) -> PositionEmbeddings:
    cos, sin = angles
    return cos[0].contiguous(), sin[0].contiguous()


def described_norm(norm: Norm | None) -> cpu.RmsNorm:
    """For compiled code; of no norm the weight is NULL."""
    return cpu.RmsNorm() if norm is None else cpu.RmsNorm.of(norm.weight, norm.epsilon, *norm.form)


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

"""The pass over a loaded network that puts our parts in place of transformers': attention sites, linears, experts.

Our layers own their weights. Quantised ones are ours on every device. On CPU plain ones lie in oneDNN's blocked
layout, which reads two to three times as fast for few rows and gives equal bits for any number of rows from two on; the
model never runs fewer (see `Model.compute`). In bfloat16 the layout and the product are our own where the processor
allows, and a usual decoder layer is one call. On devices plain products are torch's; what lies between them is fused
(twins.py).
"""

from itertools import pairwise

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.shard.attention import AttentionBackend
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.adapters.discovery import PackedLinear, Target, hook_plain, mark_targets, target_of
from lorikeet.shard.model.attention_binding import AttentionBinding, replace_legacy
from lorikeet.shard.model.fusion.select import choose
from lorikeet.shard.model.kernels.packing import SharedMatrix, can_pack, pack, return_freed_memory
from lorikeet.shard.model.moe.cuda import place_experts
from lorikeet.shard.model.moe.experts import PackedExperts, is_experts
from lorikeet.shard.model.moe.routers import replace_router_weights
from lorikeet.shard.model.quantization.layers import is_quantized, matrix_of
from lorikeet.shard.model.quantization.matrices import QuantizedMatrix


def replace_layers(
    network: nn.Module,
    backend: AttentionBackend,
    inputs: StepInputs,
    dtype: torch.dtype,
    is_whole: bool = True,
    fusions: str = "auto",
) -> dict[str, Target]:
    """Bind every attention module to the backend, put fused twins in place (`fusions`: which, see twins.py) and give
    weight matrices their packed layer: quantised ones always, plain ones on CPU. Unless it `is_whole` every module
    stays in its place: the sums over ranks come between them, each at a module of its plan.

    Returns where adapters can change the network, by module name. Raises ValueError for twins that cannot be had.
    """
    replace_legacy(network, backend, inputs)
    targets = mark_targets(network, inputs, dtype)
    for module in list(network.modules()):
        if isinstance(getattr(module, "layer_idx", None), int):
            module.lorikeet_target = AttentionBinding(backend, inputs)
    _take_over_quantized(network, dtype)
    tied = _shared_weights(network)
    fusion = choose(fusions, network, inputs.device, dtype, tied) if is_whole else None
    if fusion is not None:
        fusion.place(network)
    if inputs.device.type == "cpu" and can_pack(dtype):
        _pack_layers(network, tied, is_whole)
    place_experts(network)
    hook_plain(network)
    return targets


def _take_over_quantized(network: nn.Module, dtype: torch.dtype) -> None:
    """Put our layers in place of quantised ones, which keep the weight as it is."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if is_quantized(child):
                matrix = matrix_of(child, dtype)
                matrix.copy_from_mmap()
                setattr(parent, name, PackedLinear(matrix, target_of(child)))


def quantized_matrices(network: nn.Module) -> list[QuantizedMatrix]:
    """Of the layers that this pass has put in place of quantised ones."""
    matrices = [module.matrix for module in network.modules() if isinstance(module, PackedLinear)]
    return [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]


def _pack_layers(network: nn.Module, tied: set[int], is_whole: bool) -> None:
    for parent in list(network.modules()):
        if is_experts(parent):
            parent.lorikeet_experts = PackedExperts(parent)
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | Conv1D):
                setattr(parent, name, _packed(child, is_shared=id(child.weight) in tied))
    replace_router_weights(network)
    _leave_the_file(network, set() if is_whole else tied)
    return_freed_memory()


def _packed(module: nn.Linear | Conv1D, is_shared: bool) -> PackedLinear:
    """The packed layer of a module, whose own weight is dropped. Conv1D keeps its weight as [in, out]."""
    bias = None if module.bias is None else module.bias.detach()
    if is_shared and isinstance(module, nn.Linear):
        return PackedLinear(SharedMatrix(module.weight, bias), target_of(module))
    weight = module.weight.detach()
    packed = PackedLinear(pack(weight.t() if isinstance(module, Conv1D) else weight, bias), target_of(module))
    del module.weight
    return packed


def _leave_the_file(network: nn.Module, copied: set[int]) -> None:
    """Copy the remaining plain weights: one view into the mapped checkpoint would keep all of it resident. `copied`:
    ids of weights that are copies already.
    """
    for parameter in set(network.parameters()):
        if id(parameter) not in copied:
            parameter.data = parameter.data.clone()


def _shared_weights(network: nn.Module) -> set[int]:
    """Ids of weights that more than one module holds, all or a part of them: a tied head stays plain, for a second copy
    would cost memory.
    """
    held = [parameter for module in network.modules() for parameter in module.parameters(recurse=False)]
    held.sort(key=lambda parameter: parameter.data_ptr())
    shared: set[int] = set()
    for before, after in pairwise(held):
        if after.data_ptr() < before.data_ptr() + before.numel() * before.element_size():
            shared |= {id(before), id(after)}
    return shared

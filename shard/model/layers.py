"""The pass over a loaded network that replaces transformers' attention, linear layers and experts by ours.

Our layers own their weights. Quantised layers are replaced on every device. On CPU plain weights lie in a layout of
ours, or in oneDNN's, which are read two to three times as fast for few rows and give equal bits for any number of rows
from two on; transformers' code never runs fewer (see `Model.compute`). In bfloat16 a usual decoder layer is one call;
in float32 norms and activations of encoders are fused with products. On devices plain products are torch's; the
operators between them are fused (fusion/select.py).
"""

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lorikeet.proto.process import FreedMemory, return_freed_memory
from lorikeet.shard.attention import AttentionBackend
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.adapters.discovery import (
    PackedLinear,
    Target,
    hook_plain,
    mark_norms,
    mark_targets,
    target_of,
)
from lorikeet.shard.model.attention_binding import AttentionBinding, is_attention, replace_legacy
from lorikeet.shard.model.fusion.attention import FusedAttention
from lorikeet.shard.model.fusion.encoder import can_fuse, fuse_encoder
from lorikeet.shard.model.fusion.parts import FusedMlp
from lorikeet.shard.model.fusion.select import choose
from lorikeet.shard.model.kernels.packing import (
    PackedMatrix,
    SharedMatrix,
    StreamedMatrix,
    can_pack,
    can_stream,
    embed_by,
    pack,
)
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.model.moe.experts import PackedExperts, is_experts, place_experts
from lorikeet.shard.model.moe.routers import replace_router_weights
from lorikeet.shard.model.quantization.integers import pack_rounded, rounding_of
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
    """Bind every attention module to the backend, fuse modules (`fusions`: see fusion/select.py) and pack weight
    matrices: quantised ones always, plain ones on CPU. Unless `is_whole`, only kernels of devices fuse: the sums over
    ranks are hooks of plain modules, which fused ones for the CPU do not keep.

    Returns the modules that adapters can change, by name. Raises ValueError for fusions that are not available.
    """
    replace_legacy(network, backend, inputs)
    targets = mark_targets(network, inputs, dtype) | mark_norms(network, inputs)
    for module in list(network.modules()):
        if is_attention(module):
            module.lorikeet_binding = AttentionBinding(backend, inputs)
    if rounding_of(network) is None:
        _take_over_quantized(network, dtype)
    tied = _shared_weights(network)
    fusion = choose(fusions, network, inputs.device, dtype, tied)
    if fusion is not None and (is_whole or fusion.kernels.keeps_outputs):
        fusion.place(network)
    if is_whole and can_fuse(fusions, inputs.device, dtype):
        fuse_encoder(network)
    _take_over_quantized(network, dtype)  # rounded weights, unless they are fused
    _round_experts(network)
    is_packed = inputs.device.type == "cpu" and can_pack(dtype)
    replace_router_weights(network, dtype, is_packed)
    if is_packed:
        _pack_layers(network, tied, is_whole)
    place_experts(network)
    hook_plain(network)
    held = {id(of) for module in network.modules() for of in (target_of(module), getattr(module, "adapters", None))}
    targets = {name: target for name, target in targets.items() if not _is_norm(target) or id(target) in held}
    for target in targets.values():
        if isinstance(target, LoraTarget):  # those of weights in a file are known now
            target.squared_norms = target.squared_norms.to(inputs.device)
    return targets


def _is_norm(target: Target) -> bool:
    return isinstance(target, LoraTarget) and target.is_norm


def _take_over_quantized(network: nn.Module, dtype: torch.dtype) -> None:
    """Replace quantised layers by ours, which keep the weight as it is."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if is_quantized(child):
                matrix = matrix_of(child, dtype)
                matrix.copy_from_mmap()
                setattr(parent, name, PackedLinear(matrix, target_of(child)))


def _round_experts(network: nn.Module) -> None:
    """Replace the experts of a network whose weights are rounded."""
    rounding = rounding_of(network)
    if rounding is None:
        return
    for name, block in list(network.named_modules()):
        if is_experts(block):
            try:
                block.lorikeet_experts = PackedExperts(block, partial(pack_rounded, rounding=rounding))
            except ValueError as reason:
                raise ValueError(f"experts of {name}: {reason}") from None


def quantized_matrices(network: nn.Module) -> list[QuantizedMatrix]:
    """Matrices of the layers that replace quantised ones, and of fused ones."""
    matrices: list[PackedMatrix] = []
    for module in network.modules():
        if isinstance(module, PackedLinear):
            matrices.append(module.matrix)
        elif isinstance(module, FusedAttention):
            matrices.append(module.qkv)
        elif isinstance(module, FusedMlp):
            matrices += module.ups
    return [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]


def _pack_layers(network: nn.Module, tied: set[int], is_whole: bool) -> None:
    freed = FreedMemory()
    embeddings = _tied_embeddings(network) if is_whole else {}
    for parent in list(network.modules()):
        if is_experts(parent):
            parent.lorikeet_experts = PackedExperts(parent)
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | Conv1D):
                num_bytes = child.weight.nbytes
                is_shared, embedding = id(child.weight) in tied, embeddings.get(id(child.weight))
                setattr(parent, name, _packed(child, is_shared, embedding))
                freed.add(num_bytes)
    if not getattr(network, "lorikeet_owns_weights", False):
        _copy_from_mmap(network, set() if is_whole else tied)
    return_freed_memory()


def _tied_embeddings(network: nn.Module) -> dict[int, nn.Embedding]:
    """By the id of their weight: embeddings that could read the packed weight of the output head, the only module that
    shares it.
    """
    holders: dict[int, list[nn.Module]] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(module)
    found: dict[int, nn.Embedding] = {}
    for weight, modules in holders.items():
        embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
        if len(modules) == 2 and len(embeddings) == 1 and can_stream(embeddings[0].weight):
            found[weight] = embeddings[0]
    return found


def _packed(module: nn.Linear | Conv1D, is_shared: bool, embedding: nn.Embedding | None) -> PackedLinear:
    """The packed layer of a module, whose weight is dropped; `embedding` may use it too. Conv1D keeps its weight as
    [in, out].
    """
    bias = None if module.bias is None else module.bias.detach()
    if embedding is not None:
        matrix = pack(module.weight.detach(), bias)
        if isinstance(matrix, StreamedMatrix) and embed_by(embedding, matrix):
            return PackedLinear(matrix, target_of(module))
    if is_shared and isinstance(module, nn.Linear):
        return PackedLinear(SharedMatrix(module.weight, bias), target_of(module))
    weight = module.weight.detach()
    packed = PackedLinear(pack(weight.t() if isinstance(module, Conv1D) else weight, bias), target_of(module))
    del module.weight
    return packed


def _copy_from_mmap(network: nn.Module, copied: set[int]) -> None:
    """Copy the remaining plain weights: one view into the mapped checkpoint would keep all of it resident. `copied`:
    ids of weights that are copies already.
    """
    for parameter in set(network.parameters()):
        if id(parameter) not in copied:
            parameter.data = parameter.data.clone()


def _shared_weights(network: nn.Module) -> set[int]:
    """Ids of weights that more than one module holds, wholly or in part: they stay plain, because a second copy would
    cost memory, unless the other module is an embedding that can read the packed weight.
    """
    held = [parameter for module in network.modules() for parameter in module.parameters(recurse=False)]
    held.sort(key=lambda parameter: parameter.data_ptr())
    shared: set[int] = set()
    for before, after in pairwise(held):
        if after.data_ptr() < before.data_ptr() + before.numel() * before.element_size():
            shared |= {id(before), id(after)}
    return shared

"""Products of rows that are sorted by matrix: `y = x Wᵉ`, e the matrix of the row. For devices.

torch's product is used where it is one launch that does not wait for the host: in bfloat16 on GPUs that it supports.
Otherwise it is ours (products_triton.py). Both choose their tiles by the number of rows and the shapes alone, and a row
is a row of one matrix's tile: it does not depend on its neighbours, provided that a matrix unit computes the rows of a
tile alike.
"""

import torch
from torch.nn import functional

from lorikeet.shard.model.kernels.pairs import SortedPairs
from lorikeet.shard.system import gpu

_NATIVE = (9, 10)
"""Major compute capabilities for which torch's product is one launch; elsewhere it waits for the device."""


def multiply_grouped(
    x: torch.Tensor, matrices: torch.Tensor, biases: torch.Tensor | None, pairs: SortedPairs
) -> torch.Tensor:
    """x: [P, in] as the pairs lie; matrices: [experts, in, out], strided at will; biases: [experts, out]. Returns
    [P, out].
    """
    if _is_host(x.device):
        y = multiply_reference(x, matrices, pairs)
    elif is_native(x, matrices):
        y = functional.grouped_mm(x, matrices, offs=pairs.ends)
    else:
        from lorikeet.shard.model.kernels.products_triton import multiply_tiles

        y = multiply_tiles(x, matrices, pairs)
    return y if biases is None else y.add_(biases[pairs.experts])


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def is_native(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether torch's product supports these layouts and does not read the ends of groups on the host."""
    if x.dtype != torch.bfloat16 or gpu.capability(x.device)[0] not in _NATIVE:
        return False
    strides = [*x.stride(), *matrices.stride()]
    is_aligned = all(stride == 1 or stride % (16 // x.element_size()) == 0 for stride in strides)
    return is_aligned and 1 in matrices.stride()[1:] and x.stride(1) == 1


def multiply_reference(x: torch.Tensor, matrices: torch.Tensor, pairs: SortedPairs) -> torch.Tensor:
    """The specification, used on CPU. Reads the ends of groups on the host."""
    y = x.new_empty(x.shape[0], matrices.shape[2])
    for expert, span in pairs.spans():
        torch.mm(x[span], matrices[expert], out=y[span])
    return y

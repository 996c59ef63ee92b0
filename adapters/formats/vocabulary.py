"""Adapters that add tokens: rows after those of the base's embedding and output head, which are zeros in the base.

PEFT saves both modules with every adapter whose base was resized, next to what it trained of them.
"""

from collections.abc import Mapping

import torch

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.adapters.formats.base_model import Skeleton

_PREFIX = "base_model.model."
_AXES = {
    "weight": 0,
    "bias": 0,
    "base_layer.weight": 0,
    "base_layer.bias": 0,
    "modules_to_save.weight": 0,
    "modules_to_save.bias": 0,
    "original_module.weight": 0,
    "token_adapter.base_layer.weight": 0,
    "lora_embedding_A": 1,
    "lora_B.weight": 0,
    "lora_magnitude_vector.weight": 0,
}
"""The axis of tokens, by the name of a tensor below its module."""

Tensors = Mapping[str, torch.Tensor]


def num_added(skeleton: Skeleton, tensors: Tensors) -> int:
    """Tokens that an adapter adds to the base's. Raises AdapterInvalid for rows of another tokenizer, for more than the
    base has room for, and for an embedding and an output head of different sizes.
    """
    found: dict[str, int] = {}
    for key, tensor in tensors.items():
        module, axis = _place(skeleton, key)
        if axis is None or tensor.dim() <= axis:
            continue
        num_rows = tensor.shape[axis]
        if num_rows < skeleton.vocab_size or (num_rows > skeleton.vocab_size and skeleton.task is not None):
            problem = f"its {module} has {num_rows} rows, the base's {skeleton.vocab_size}"
            raise AdapterInvalid(f"{problem}: it was trained with another tokenizer")
        count = num_rows - skeleton.vocab_size
        if count > skeleton.num_extra:
            problem = f"its {module} has {num_rows} rows, the base's {skeleton.vocab_size}"
            raise AdapterInvalid(f"{problem}: that needs --adapter-extra-vocab-size {count} or more")
        if found.setdefault(module, count) != count:
            raise AdapterInvalid(f"its tensors of {module} have different numbers of rows")
    counts = set(found.values())
    if counts <= {0}:
        return 0
    if len(counts) > 1 or len(found) < len(skeleton.ends):
        module = min(skeleton.ends, key=lambda module: found.get(module, 0))
        problem = f"it adds {max(counts)} tokens, but has {found.get(module, 0)} rows of {module} for them"
        raise AdapterInvalid(problem)
    return counts.pop()


def resized(skeleton: Skeleton, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors with zeros for the rows that the base has behind those of the adapter, and without repeated ones."""
    num_rows = skeleton.vocab_size + skeleton.num_extra
    found = {key: tensor for key, tensor in tensors.items() if not _is_repeated(skeleton, key, tensors)}
    for key, tensor in found.items():
        _, axis = _place(skeleton, key)
        if axis is not None and (missing := num_rows - tensor.shape[axis]):
            shape = [*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]]
            found[key] = torch.cat([tensor, tensor.new_zeros(shape)], axis)
    return found


def _place(skeleton: Skeleton, key: str) -> tuple[str, int | None]:
    """The end of the base that a tensor belongs to, and its axis of tokens; None for any other tensor."""
    name = key.removeprefix(_PREFIX)
    for module in skeleton.ends:
        if name.startswith(f"{module}."):
            return module, _AXES.get(name.removeprefix(f"{module}."))
    return "", None


def _is_repeated(skeleton: Skeleton, key: str, tensors: Tensors) -> bool:
    """Whether PEFT reads a tensor from another one: a copy of new weights, the weights that they replace, or the new
    rows of a tied output head.
    """
    name = key.removeprefix(_PREFIX)
    start = key.removesuffix(name)
    for module in skeleton.ends:
        if name == f"{module}.original_module.weight":
            return f"{start}{module}.weight" in tensors
        if name == f"{module}.modules_to_save.weight":
            return _equals(tensors[key], tensors.get(f"{start}{module}.weight"))
        if skeleton.is_tied and module != skeleton.ends[0] and name.startswith(f"{module}.token_adapter."):
            return _equals(tensors[key], tensors.get(f"{start}{skeleton.ends[0]}{name.removeprefix(module)}"))
    return False


def _equals(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and torch.equal(tensor, other)

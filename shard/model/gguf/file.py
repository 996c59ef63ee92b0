"""A `.gguf` file: what it must have to be served, and its tensors."""

from pathlib import Path
from typing import Any

import torch

from lorikeet.shard.model.gguf.blocks import FORMATS, read_blocks
from lorikeet.shard.model.kernels.integer import IntegerWeight

PLAIN = ("F32", "F16", "BF16")
"""Types of tensors that are numbers without blocks."""
ROPE_SCALING = "rope.scaling.type"
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of what frequencies of positions are divided by, in files of Llama 3.x."""


class GgufFile:
    """An open file. Tensors are views into it."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError with a reason if it cannot be served."""
        from gguf import GGUFReader

        try:
            reader: Any = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as failure:
            raise ValueError(f"{path} cannot be read as a .gguf file: {failure}") from None
        self._fields = reader.fields
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.value("general.architecture"))
        for name, tensor in self.tensors.items():
            if self.kind(name) not in (*PLAIN, *FORMATS):
                served = ", ".join((*PLAIN, *FORMATS))
                raise ValueError(f"its tensor {name} has the type {tensor.tensor_type.name}; served are {served}")
        if (scaling := self.of_architecture(ROPE_SCALING)) not in (None, "none", "linear"):
            raise ValueError(f"its positions are scaled ({ROPE_SCALING} {scaling}): use the original checkpoint")

    def value(self, key: str) -> Any:
        """A value of the metadata, None if there is none."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def of_architecture(self, key: str) -> Any:
        """A value of the metadata under the architecture's name, None if there is none."""
        return self.value(f"{self.architecture}.{key}")

    def kind(self, name: str) -> str:
        """The type of a tensor."""
        return str(self.tensors[name].tensor_type.name)

    def integers(self, name: str) -> IntegerWeight:
        """A tensor in blocks, [out, in]."""
        return read_blocks(self.kind(name), torch.from_numpy(self.tensors[name].data.copy()))

    def dense(self, name: str) -> torch.Tensor:
        """Any tensor, in float32."""
        from gguf import dequantize

        tensor = self.tensors[name]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())

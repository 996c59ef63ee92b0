"""A LoRA in a `.gguf` file of llama.cpp (`convert_lora_to_gguf.py`), as PEFT's settings and tensors.

transformers has the table of names, and the order in which these files have the rows of some weights.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lorikeet.adapters.errors import AdapterInvalid, AdapterTooLarge, NotServed, first_line
from lorikeet.adapters.formats.base_model import Skeleton
from lorikeet.adapters.formats.weights import Weights

A, B = ".lora_a", ".lora_b"
ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
DTYPES = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""The types that llama.cpp writes adapters in."""
LLAMAS = frozenset({"llama", "mistral"})
"""transformers' model types whose files have the architecture `llama`."""


def read(path: Path, limit: int, skeleton: Skeleton) -> tuple[dict[str, Any], Weights]:
    """The configuration and the tensors that PEFT would have. Raises AdapterInvalid, AdapterTooLarge or NotServed."""
    num_bytes = path.stat().st_size
    if num_bytes > limit:
        raise AdapterTooLarge(f"{path.name} has {num_bytes} bytes; the limit is {limit}")
    file = _File(path)
    names = _Names(skeleton, file.architecture)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name in file.tensors:
        ending = name[-len(A) :]
        if ending not in (A, B):
            raise NotServed(f"its tensor {name[:200]} is not a factor of a LoRA: what it does is not served")
        pairs.setdefault(name.removesuffix(ending), {})[ending] = file.tensor(name)
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    for name, pair in pairs.items():
        if len(pair) != 2:
            raise AdapterInvalid(f"{path.name} has one of the two factors of {name[:200]}")
        module, a, b, is_embedding = names.factors(name, pair[A], pair[B])
        ranks[module] = a.shape[0]
        ends = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{module}.{end}": factor for end, factor in zip(ends, (a, b), strict=True)}
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    return file.settings(ranks), Weights(tensors, digest, num_bytes, share_no_memory=True)


class _File:
    """The metadata and tensors of a file."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader: Any = GGUFReader(path)
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            kind, of = self._value("general.type"), self._value("adapter.type")
            self.architecture = str(self._value("general.architecture"))
            self.alpha = self._value(ALPHA)
            self.invocation_ids = self._value(INVOCATION)
        except Exception as error:  # the reader checks nothing
            raise AdapterInvalid(f"{path.name} is not a file of llama.cpp: {first_line(error)[:200]}") from None
        if (kind, of) != ("adapter", "lora"):
            what = f"{kind or 'model'} {of or ''}".strip()[:80]
            raise AdapterInvalid(f"{path.name} holds a {what}, not a LoRA")
        if not self.tensors:
            raise AdapterInvalid(f"{path.name} holds no tensors")

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def tensor(self, name: str) -> torch.Tensor:
        """Its values in float32, with the shape that torch has."""
        from gguf import dequantize

        tensor = self.tensors[name]
        if tensor.tensor_type.name not in DTYPES or len(tensor.shape) != 2:
            raise NotServed(f"its tensor {name[:200]} has the type {tensor.tensor_type.name}")
        return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))

    def settings(self, ranks: dict[str, int]) -> dict[str, Any]:
        """`ranks`: by module. llama.cpp divides alpha by the rank of each module, and takes alpha 0 as no scaling."""
        most = max(ranks.values())
        others = {module: rank for module, rank in ranks.items() if rank != most}
        values: dict[str, Any] = {"peft_type": "LORA", "r": most, "target_modules": sorted(ranks)}
        values |= {"rank_pattern": others, "lora_alpha": self.alpha or most}
        if not self.alpha:
            values["alpha_pattern"] = others
        if self.invocation_ids:
            values["alora_invocation_tokens"] = list(self.invocation_ids)
        return values


class _Names:
    """The modules of a base by the names of their weights in files."""

    def __init__(self, skeleton: Skeleton, architecture: str) -> None:
        """Raises NotServed."""
        config = skeleton.config
        processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        with skeleton.borrowed() as network:
            names = _WithoutParts(network)
            modules = dict(network.named_modules())
            embedding = network.get_input_embeddings()
        own = "llama" if config.model_type in LLAMAS else config.model_type
        try:
            self._names: dict[str, str] = get_gguf_hf_weights_map(names, processor, own)
        except Exception as error:
            raise NotServed(
                f"transformers has no names of llama.cpp for {config.model_type}: {first_line(error)[:120]}"
            ) from None
        if architecture.replace("-", "_") not in (own, own.removesuffix("_text")):
            raise AdapterInvalid(f"it was made for the architecture {architecture[:60]}, the base is {own}")
        self._processor, self._modules = processor, modules
        self._embedding = embedding

    def factors(self, name: str, a: torch.Tensor, b: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor, bool]:
        """The module of a weight, A [rank, in] and B [out, rank] in PEFT's order, and whether it is an embedding."""
        place = self._names.get(name)
        if place is None:
            raise AdapterInvalid(f"its tensor {name[:200]} has no place in the base")
        module = place.removesuffix(".weight")
        if self._modules.get(module) is self._embedding:
            return module, a.t().contiguous(), b, True
        return module, a, b[self._order(name, b.shape[0])], False

    def _order(self, name: str, num_rows: int) -> torch.Tensor:
        """Which rows of a file's weight transformers has, in its order."""
        rows = np.arange(num_rows, dtype=np.float32)[:, None]
        try:
            order = self._processor.process(
                weights=rows, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": {}}
            ).weights
        except Exception as error:
            raise NotServed(f"its tensor {name[:200]} has another form: {first_line(error)[:120]}") from None
        if order.shape != rows.shape or not np.array_equal(np.sort(order, axis=0), rows):
            raise NotServed(f"its tensor {name[:200]} is stored in another form than rows of weights")
        return torch.from_numpy(order[:, 0].astype(np.int64))


class _WithoutParts:
    """A network that names its weights, and not its modules: transformers would make its table for each of them."""

    def __init__(self, network: Any) -> None:
        self.config, weights = network.config, dict(network.state_dict())
        self.state_dict = lambda: weights

    def named_children(self) -> list[Any]:
        return []

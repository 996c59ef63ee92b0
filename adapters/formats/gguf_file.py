"""A LoRA in a `.gguf` file of llama.cpp (`convert_lora_to_gguf.py`), as PEFT's settings and tensors.

transformers has the table of names, and the order in which these files have the rows of some weights.
"""

import mmap
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lorikeet.adapters.errors import AdapterInvalid, NotServed, first_line
from lorikeet.adapters.formats.base_model import Skeleton
from lorikeet.adapters.formats.configuration import MAX_RANK
from lorikeet.proto.config_file import is_number
from lorikeet.proto.gguf.header import Header

A, B = ".lora_a", ".lora_b"
ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
DTYPES = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""The types that llama.cpp writes adapters in."""
LARGEST_ALPHA = 1e9
LLAMAS = frozenset({"llama", "mistral"})
"""transformers' model types whose files have the architecture `llama`."""


def read(
    content: bytes | mmap.mmap, num_bytes: int, name: str, skeleton: Skeleton, has_values: bool = True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the tensors that PEFT would have. `num_bytes`: of the file, whose beginning is enough
    without values. Tensors are then on the meta device. Raises AdapterInvalid or NotServed.
    """
    file = _File(content, num_bytes, name, has_values)
    names = _Names(skeleton, file.architecture)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name in file.places:
        ending = tensor_name[-len(A) :]
        if ending not in (A, B):
            raise NotServed(f"its tensor {tensor_name[:200]} is not a factor of a LoRA: what it does is not served")
        pairs.setdefault(tensor_name.removesuffix(ending), {})[ending] = file.tensor(tensor_name)
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    for tensor_name, pair in pairs.items():
        if len(pair) != 2:
            raise AdapterInvalid(f"{name} has one of the two factors of {tensor_name[:200]}")
        module, a, b, is_embedding = names.factors(tensor_name, pair[A], pair[B])
        rank = ranks[module] = a.shape[0]
        if rank > MAX_RANK:
            raise AdapterInvalid(f"its tensor {tensor_name[:200]}{A} has rank {rank}; the limit is {MAX_RANK}")
        ends = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{module}.{end}": factor for end, factor in zip(ends, (a, b), strict=True)}
    return file.settings(ranks), tensors


class _File:
    """The metadata and tensors of a file."""

    def __init__(self, content: bytes | mmap.mmap, num_bytes: int, name: str, has_values: bool) -> None:
        self._content, self._has_values = content, has_values
        try:
            header = Header(content, num_bytes)
            keys = ("general.type", "adapter.type", "general.architecture", ALPHA, INVOCATION)
            kind, of, architecture, self.alpha, self.invocation_ids = map(header.value, keys)
        except ValueError as error:
            raise AdapterInvalid(f"{name} is not a file of llama.cpp: {first_line(error)[:200]}") from None
        self.architecture, self.places = str(architecture), header.tensors
        if (kind, of) != ("adapter", "lora"):
            what = f"{kind or 'model'} {of or ''}".strip()[:80]
            raise AdapterInvalid(f"{name} holds a {what}, not a LoRA")
        if not self.places:
            raise AdapterInvalid(f"{name} holds no tensors")
        if self.alpha is not None and not is_number(self.alpha, LARGEST_ALPHA):
            raise AdapterInvalid(f"its {ALPHA} is {self.alpha!r:.60}; it must be a number up to {LARGEST_ALPHA:g}")
        if self.invocation_ids is not None and not isinstance(self.invocation_ids, list):
            raise AdapterInvalid(f"its {INVOCATION} is {self.invocation_ids!r:.60}; it must be a list of token ids")

    def tensor(self, name: str) -> torch.Tensor:
        """Its values in float32, with the shape that torch has."""
        from gguf import GGMLQuantizationType, dequantize

        place = self.places[name]
        if place.kind.name not in DTYPES:
            served = ", ".join(sorted(DTYPES))
            raise NotServed(f"its tensor {name[:200]} has the type {place.kind.name}; adapters are served in {served}")
        if len(place.shape) != 2:
            raise NotServed(f"its tensor {name[:200]} has {len(place.shape)} dimensions; factors with 2 are served")
        if not self._has_values:
            return torch.empty(place.shape, device="meta")
        stored = np.frombuffer(self._content, np.uint8, place.num_bytes, place.offset).reshape(place.shape[0], -1)
        return torch.from_numpy(np.array(dequantize(stored, GGMLQuantizationType[place.kind.name]), np.float32))

    def settings(self, ranks: dict[str, int]) -> dict[str, Any]:
        """`ranks`: by module. llama.cpp divides alpha by the rank of each module, and takes alpha 0 as no scaling."""
        most = max(ranks.values())
        others = {module: rank for module, rank in ranks.items() if rank != most}
        values: dict[str, Any] = {"peft_type": "LORA", "r": most, "target_modules": sorted(ranks)}
        values |= {"rank_pattern": others, "lora_alpha": self.alpha or most}
        if not self.alpha:
            values["alpha_pattern"] = others
        if self.invocation_ids:
            values["alora_invocation_tokens"] = self.invocation_ids
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

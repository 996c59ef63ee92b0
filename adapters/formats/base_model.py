"""The base model as adapters see it: its network without weights, and the values of its own parameters.

The network is on the meta device, and adapters name its modules as their targets. PEFT modifies it when it reads an
adapter; it is restored afterwards, so it is built once per process. The checkpoint is opened only when an adapter has
new parameters, to which the shard adds the difference; transformers' rules rename its keys.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lorikeet.adapters.errors import NotServed
from lorikeet.proto import pooling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_AUTO: dict[str, Any] = {
    pooling.EMBED: AutoModel,
    pooling.CLASSIFY: AutoModelForSequenceClassification,
    pooling.TOKEN_CLASSIFY: AutoModelForTokenClassification,
}
"""transformers' class by task."""


class Skeleton:
    """The base that adapters are read for."""

    def __init__(
        self,
        model_path: str | Path,
        trust_remote_code: bool = False,
        pooled_by: str = "",
        dimensions: int | None = None,
        num_extra: int = 0,
    ) -> None:
        """`pooled_by` and `dimensions`: `--pooling` and `--embedding-dim`. `num_extra`: rows after the base's,
        for tokens that adapters add. Raises ValueError or OSError if there is no model in the folder.
        """
        self.model_path = Path(model_path)
        self.config = AutoConfig.from_pretrained(
            self.model_path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        self.pooled = pooling.read(self.model_path, self.config.to_dict(), pooled_by, dimensions)
        auto = AutoModelForCausalLM if self.pooled is None else _AUTO[self.pooled.task]
        if num_extra:
            self.config.get_text_config().vocab_size += num_extra
        with torch.device("meta"):
            network: nn.Module = auto.from_config(self.config, trust_remote_code=trust_remote_code)
        network.requires_grad_(False)
        network.eval()
        self.is_tied = _is_tied(network)
        """Whether the output head is the embedding."""
        self._network = network
        self.ends = _ends(network)
        """Names of the embedding, and of the output head if there is one."""
        self.vocab_size = int(network.get_input_embeddings().weight.shape[0]) - num_extra  # type: ignore[operator]
        self.num_extra = num_extra
        """Rows of both behind the `vocab_size` of the base."""
        self._modules = [(module, dict(module._modules)) for module in network.modules()]
        self._parameters = [(module, dict(module._parameters)) for module in network.modules()]
        self._attributes = set(vars(network))
        self._is_borrowed = False

    @contextmanager
    def borrowed(self) -> Iterator[Any]:
        """The network, which the caller may modify inside, where it cannot be borrowed again."""
        assert not self._is_borrowed
        self._is_borrowed = True
        try:
            yield self._network
        finally:
            for module, children in self._modules:
                module._modules.clear()
                module._modules.update(children)
            for module, parameters in self._parameters:
                module._parameters.clear()
                module._parameters.update(parameters)
            for name in set(vars(self._network)) - self._attributes:
                delattr(self._network, name)
            self._is_borrowed = False

    def num_ids(self, num_added: int) -> int:
        """Where the ids of an adapter with so many tokens of its own end; 0 if none may have any."""
        return self.vocab_size + num_added if self.num_extra else 0

    @cached_property
    def output_shape(self) -> tuple[int, int] | None:
        """Rows and columns of the output head, [V, H]; None if the network has none."""
        output = self._network.get_output_embeddings()  # type: ignore[operator]
        if output is None:
            return None
        num_rows, num_columns = output.weight.shape
        return int(num_rows), int(num_columns)

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Of all parameters of the network, which must not be borrowed."""
        return frozenset(name for name, _ in self._network.named_parameters(remove_duplicate=False))

    @property
    def task(self) -> str | None:
        """What the base computes in place of text; None for one that generates."""
        return None if self.pooled is None else self.pooled.task

    @property
    def model_prefix(self) -> str:
        """The name under which a model of this architecture that has a head keeps the other modules, with a dot."""
        return f"{self._network.base_model_prefix}."

    @property
    def num_bytes(self) -> int:
        """Of the base's parameters in float32."""
        tensors = {
            id(tensor): tensor for _, named in self._parameters for tensor in named.values() if tensor is not None
        }
        return 4 * sum(tensor.numel() for tensor in tensors.values())

    def parameter_ids(self) -> set[int]:
        """Identities of the base's own parameters: all others in the network come from an adapter."""
        tensors = (parameter for _, parameters in self._parameters for parameter in parameters.values())
        return {id(parameter) for parameter in tensors if parameter is not None}


def _ends(network: Any) -> tuple[str, ...]:
    modules = {id(module) for module in (network.get_input_embeddings(), network.get_output_embeddings())}
    return tuple(name for name, module in network.named_modules() if id(module) in modules)


def _is_tied(network: Any) -> bool:
    output = network.get_output_embeddings()
    return output is not None and output.weight is network.get_input_embeddings().weight


def choose_dtype(name: str | None, config: Any, device: str) -> torch.dtype:
    """The dtype that shards serve the base in: as configured, else the checkpoint's (float32 for float16 on CPU)."""
    if name is not None:
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
        return DTYPES[name]
    dtype = getattr(config, "dtype", None) or torch.float32
    dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[str(dtype)]
    return torch.float32 if dtype == torch.float16 and device == "cpu" else dtype


class BaseValues:
    """The checkpoint that the skeleton was made from."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._locations: Mapping[str, tuple[Path, str]] | None = None

    def __getitem__(self, parameter: str) -> torch.Tensor:
        """A parameter by its name in the network. Raises NotServed if the checkpoint stores it in another form."""
        if (location := self.locate().get(parameter)) is None:
            raise NotServed(f"the base's own {parameter} is needed, but its checkpoint stores it in another form")
        path, key = location
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(key)
        else:
            tensor = torch.load(path, map_location="cpu", weights_only=True, mmap=True)[key]
        missing = self._skeleton.num_extra if parameter.rpartition(".")[0] in self._skeleton.ends else 0
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

    def is_parameter(self, name: str) -> bool:
        """Whether the base has a parameter of that name, in whatever form its checkpoint stores it."""
        return name in self._skeleton.parameter_names

    def has(self, parameter: str) -> bool | None:
        """Whether the checkpoint has a parameter in its own form; None if the folder has no checkpoint."""
        return parameter in locations if (locations := self.locate()) else None

    def locate(self) -> Mapping[str, tuple[Path, str]]:
        """File and key of each parameter that the checkpoint stores unchanged. The first call borrows the network."""
        if self._locations is None:
            self._locations = self._find()
        return self._locations

    def _find(self) -> dict[str, tuple[Path, str]]:
        tied: defaultdict[int, list[str]] = defaultdict(list)
        with self._skeleton.borrowed() as network:
            mapping = get_model_conversion_mapping(network)
            parameters = dict(network.state_dict())
            prefix = network.base_model_prefix
            for name, parameter in network.named_parameters(remove_duplicate=False):
                tied[id(parameter)].append(name)
        renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
        locations: dict[str, tuple[Path, str]] = {}
        for path, key in self._keys():
            name, converted = rename_source_key(key, renamings, converters, prefix, parameters)
            if converted is None and name in parameters:
                locations[name] = (path, key)
        for names in tied.values():
            # a checkpoint stores one of several names of a parameter, such as a tied output head
            stored = next((locations[name] for name in names if name in locations), None)
            if stored is not None:
                locations = dict.fromkeys(names, stored) | locations
        return locations

    def _keys(self) -> list[tuple[Path, str]]:
        folder = self._skeleton.model_path
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = folder / f"{name}.index.json"
            if index.is_file():
                parts: dict[str, Any] = json.loads(index.read_text())["weight_map"]
                return [(folder / part, key) for key, part in parts.items()]
            if (folder / name).is_file():
                return [(folder / name, key) for key in _keys_of(folder / name)]
        return []


def _keys_of(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(torch.load(path, map_location="meta", weights_only=True))

"""The base's network without weights, on the meta device: adapters name its modules as their targets.

PEFT modifies a network when it reads an adapter; the skeleton is restored afterwards, so it is built once per process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

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
        self, model_path: str | Path, trust_remote_code: bool = False, wanted: str = "", dimensions: int | None = None
    ) -> None:
        """`wanted` and `dimensions`: `--pooling` and `--embedding-dim`. Raises ValueError or OSError if there is no
        model in the folder.
        """
        self.model_path = Path(model_path)
        self.config = AutoConfig.from_pretrained(
            self.model_path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        self.pooled = pooling.read(self.model_path, self.config.to_dict(), wanted, dimensions)
        auto = AutoModelForCausalLM if self.pooled is None else _AUTO[self.pooled.task]
        with torch.device("meta"):
            network: nn.Module = auto.from_config(self.config, trust_remote_code=trust_remote_code)
        network.requires_grad_(False)
        network.eval()
        self._network = network
        self._modules = [(module, dict(module._modules)) for module in network.modules()]
        self._parameters = [(module, dict(module._parameters)) for module in network.modules()]
        self._attributes = set(vars(network))

    @contextmanager
    def borrowed(self) -> Iterator[Any]:
        """The network, which the caller may modify inside."""
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

    @cached_property
    def output_shape(self) -> tuple[int, int] | None:
        """Rows and columns of the output head, [V, H]; None if the network has none."""
        output = self._network.get_output_embeddings()  # type: ignore[operator]
        if output is None:
            return None
        num_rows, num_columns = output.weight.shape
        return int(num_rows), int(num_columns)

    @property
    def task(self) -> str | None:
        """What the base computes in place of text; None for one that generates."""
        return None if self.pooled is None else self.pooled.task

    @property
    def trunk(self) -> str:
        """The name under which the base's modules are without its head, with a dot; empty if all are."""
        is_bare = self.pooled is None or self.pooled.task == pooling.EMBED
        return "" if is_bare else f"{self._network.base_model_prefix}."

    @property
    def model_prefix(self) -> str:
        """The name under which a model of this architecture that has a head keeps the other modules, with a dot."""
        return f"{self._network.base_model_prefix}."

    def parameter_ids(self) -> set[int]:
        """Identities of the base's own parameters: all others in the network come from an adapter."""
        tensors = (parameter for _, parameters in self._parameters for parameter in parameters.values())
        return {id(parameter) for parameter in tensors if parameter is not None}


def choose_dtype(name: str | None, config: Any, device: str) -> torch.dtype:
    """The dtype that shards serve the base in: as configured, else the checkpoint's (float32 for float16 on CPU)."""
    if name is not None:
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
        return DTYPES[name]
    dtype = getattr(config, "dtype", None) or torch.float32
    dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[str(dtype)]
    return torch.float32 if dtype == torch.float16 and device == "cpu" else dtype

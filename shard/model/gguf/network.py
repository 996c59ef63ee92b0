"""The network of a `.gguf` file: transformers' network with the file's tensors, matrices in blocks as integers.

transformers has tables of names, and functions that undo how files order rows. Rows of integers are ordered by what
such a function does to their numbers.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lorikeet.shard.model.gguf.blocks import FORMATS
from lorikeet.shard.model.gguf.file import ROPE_FACTORS, GgufFile
from lorikeet.shard.model.kernels.integer import IntegerWeight
from lorikeet.shard.model.moe.experts import is_experts
from lorikeet.shard.model.quantization.integers import IntegerLinear, Rounding

EMBEDDING = "token_embd.weight"


def load_gguf(
    file: GgufFile, checkpoint: Any, dtype: torch.dtype, options: dict[str, Any], rounds_activations: bool
) -> nn.Module:
    """The network of a configuration with the tensors of a file. `options`: of transformers' `from_config`. Raises
    ValueError for tensors that it lacks, and for tensors without a place.
    """
    from transformers import AutoModelForCausalLM

    with no_init_weights():
        network: Any = AutoModelForCausalLM.from_config(checkpoint, dtype=dtype, **options)
    if any(is_experts(module) for module in network.modules()):
        raise ValueError("mixture models are not served from a .gguf file: use the original checkpoint")
    loading = _Loading(file, network, dtype, rounds_activations)
    is_llama3 = (checkpoint.rope_parameters or {}).get("rope_type") == "llama3"
    for name in file.tensors:
        if not (is_llama3 and name == ROPE_FACTORS):  # the configuration has them
            loading.put(name)
    loading.finish()
    network.lorikeet_rounding = Rounding(4, rounds_activations)
    return nn.Module.requires_grad_(network, False)


class _Loading:
    """Puts the tensors of a file into a network."""

    def __init__(self, file: GgufFile, network: Any, dtype: torch.dtype, rounds_activations: bool) -> None:
        self._file, self._network, self._dtype = file, network, dtype
        self._rounds_activations = rounds_activations
        config = network.config.to_dict()
        self._processor: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config)
        self._names: dict[str, str] = get_gguf_hf_weights_map(network, self._processor)
        self._missing = {name for name, _ in network.named_parameters(remove_duplicate=False)}
        self._is_tied = bool(network.config.tie_word_embeddings)

    def put(self, name: str) -> None:
        """Put one tensor of the file into its place."""
        place = self._names.get(name)
        if place is None:
            raise ValueError(f"its tensor {name} has no place in transformers' {type(self._network).__name__}")
        if self._file.kind(name) in FORMATS and isinstance(self._module(place), nn.Linear):
            self._put_integers(name, place)
        else:
            self._put_dense(name, place)
        self._missing.discard(place)

    def finish(self) -> None:
        """Make the output head if the file has none; raise ValueError for weights that it lacks."""
        if self._is_tied:
            head = next(name for name, module in self._network.named_modules() if module is self._head())
            if self._file.kind(EMBEDDING) in FORMATS:
                self._put_integers(EMBEDDING, f"{head}.weight", num_shared=self._head().weight.numel())
            else:
                self._head().weight = self._network.get_input_embeddings().weight
            self._missing.discard(f"{head}.weight")
        if self._missing:
            raise ValueError(f"it has no tensor for {min(self._missing)}")

    def _head(self) -> Any:
        return self._network.get_output_embeddings()

    def _module(self, place: str) -> Any:
        return self._network.get_submodule(place.rpartition(".")[0])

    def _put_dense(self, name: str, place: str) -> None:
        values = torch.from_numpy(self._processed(self._file.dense(name).numpy(), name).copy()).to(self._dtype)
        module, attribute = self._module(place), place.rpartition(".")[2]
        wanted = tuple(getattr(module, attribute).shape)
        if tuple(values.shape) != wanted:
            raise ValueError(f"its tensor {name} has the shape {tuple(values.shape)}, not {wanted}")
        setattr(module, attribute, nn.Parameter(values, requires_grad=False))

    def _put_integers(self, name: str, place: str, num_shared: int = 0) -> None:
        weight, module = self._file.integers(name), self._module(place)
        if weight.values.shape != (module.out_features, module.in_features):
            found, wanted = tuple(weight.values.shape), (module.out_features, module.in_features)
            raise ValueError(f"its tensor {name} has the shape {found}, not {wanted}")
        numbers = np.arange(len(weight.values), dtype=np.float64)[:, None]
        order = torch.from_numpy(self._processed(numbers, name).copy())
        if order.shape != numbers.shape or not torch.equal(order.sort(0).values, torch.from_numpy(numbers)):
            raise ValueError(f"its tensor {name} is stored in another form than rows of weights")
        made = IntegerLinear(_ordered(weight, order[:, 0].long()), None, self._rounds_activations, self._dtype)
        made.bias, made.num_shared = module.bias, num_shared
        self._network.set_submodule(place.rpartition(".")[0], made)

    def _processed(self, values: Any, name: str) -> Any:
        """The values as transformers has them."""
        done = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": {}}
        )
        return done.weights


def _ordered(weight: IntegerWeight, order: torch.Tensor) -> IntegerWeight:
    """The rows of a weight in another order. order: [out]."""
    minimums = None if weight.minimums is None else weight.minimums[order]
    return IntegerWeight(weight.bits, weight.values[order], weight.scales[order], minimums)

"""The network of a `.gguf` file: transformers' network with the file's tensors, matrices in blocks as integers.

transformers has tables of names, and functions that undo how files order rows. Rows of integers are ordered by what
such a function does to their numbers.
"""

from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
import structlog
import torch
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lorikeet.proto.process import FreedMemory, return_freed_memory
from lorikeet.shard.model.gguf.blocks import FORMATS
from lorikeet.shard.model.gguf.file import ROPE_FACTORS, GgufFile
from lorikeet.shard.model.kernels.integer import IntegerWeight, StoredWeight, row_ranges, single_threaded
from lorikeet.shard.model.moe.experts import is_experts
from lorikeet.shard.model.quantization.integers import IntegerLinear, Rounding

log = structlog.get_logger()

EMBEDDING = "token_embd.weight"
RECENT_BYTES = 2 << 20
"""Rows that are kept after they were read: a matrix that is packed for a check is packed again with others soon."""


def load_gguf(
    file: GgufFile, checkpoint: Any, dtype: torch.dtype, options: dict[str, Any], rounds_activations: bool
) -> nn.Module:
    """The network of a configuration with the tensors of a file. Matrices in blocks are read when the layer pass packs
    them. `options`: of transformers' `from_config`. Raises ValueError for tensors that it lacks or has no place for.
    """
    network = _empty_network(checkpoint, dtype, options)
    loading = _Loading(file, network, dtype, rounds_activations)
    loading.check()
    log.info("gguf_tensors", **loading.counts())
    loading.put_all()
    network.lorikeet_rounding = Rounding(4, rounds_activations)
    network.lorikeet_owns_weights = True
    return nn.Module.requires_grad_(network, False)


def check_gguf(file: GgufFile, checkpoint: Any) -> None:
    """Compare the tensors of a file with the network of a configuration, without memory for either. Raises ValueError
    as `load_gguf` does.
    """
    with torch.device("meta"):
        network = _empty_network(checkpoint, torch.float32, {})
    _Loading(file, network, torch.float32, rounds_activations=False).check()


def _empty_network(checkpoint: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Memory of its weights is reserved, and used once they are written."""
    from transformers import AutoModelForCausalLM

    with no_init_weights():
        network: Any = AutoModelForCausalLM.from_config(checkpoint, dtype=dtype, **options)
    if any(is_experts(module) for module in network.modules()):
        raise ValueError("mixture models are not served from a .gguf file: use the original checkpoint")
    return network


class _Loading:
    """Puts the tensors of a file into a network."""

    def __init__(self, file: GgufFile, network: Any, dtype: torch.dtype, rounds_activations: bool) -> None:
        self._file, self._network, self._dtype = file, network, dtype
        self._rounds_activations = rounds_activations
        self._freed = FreedMemory()
        self._recent = _Recent()
        config = network.config
        self._processor: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
        self._names = _names(network, self._processor, file)
        self._is_tied = bool(config.tie_word_embeddings)
        is_llama3 = (config.rope_parameters or {}).get("rope_type") == "llama3"
        # the configuration has the factors of Llama 3
        self._tensors = [name for name in file.tensors if not (is_llama3 and name == ROPE_FACTORS)]

    def check(self) -> None:
        """Raise ValueError for weights that the file lacks, and for tensors without a place or of another shape."""
        missing = {name for name, _ in self._network.named_parameters(remove_duplicate=False)}
        for name in self._tensors:
            place = self._names.get(name)
            if place is None:
                raise ValueError(f"its tensor {name} has no place in transformers' {type(self._network).__name__}")
            if self._is_integers(name, place):
                shape, expected = self._file.shape(name), self._shape(place)
            else:  # as far as it does not depend on values
                stored = np.broadcast_to(np.float32(1), self._file.shape(name))
                shape, expected = tuple(self._processed(stored, name).shape), self._shape(place)
            if shape != expected:
                raise ValueError(f"its tensor {name} has the shape {shape}, not {expected}")
            missing.discard(place)
        if self._is_tied:
            missing.discard(f"{self._head_name()}.weight")
        if missing:
            raise ValueError(f"it has no tensor for {min(missing)}")

    def counts(self) -> dict[str, dict[str, int]]:
        """How many tensors of each type are multiplied as integers, and how many are dequantised."""
        integers, dense = Counter[str](), Counter[str]()
        for name in self._tensors:
            kind = self._file.kind(name)
            if self._is_integers(name, self._names[name]):
                integers[f"{kind} in {FORMATS[kind].bits} bits"] += 1
            else:
                dense[kind] += 1
        return {"integers": dict(integers), "dense": dict(dense)}

    def put_all(self) -> None:
        """Put every tensor into its place. `check` comes first."""
        for name in self._tensors:
            place = self._names[name]
            if self._is_integers(name, place):
                self._put_integers(name, place)
                continue
            with single_threaded():
                self._put_dense(name, place)
        if self._is_tied and self._file.kind(EMBEDDING) in FORMATS:
            self._put_integers(EMBEDDING, f"{self._head_name()}.weight", num_shared=self._head().weight.numel())
        elif self._is_tied:
            self._head().weight = self._network.get_input_embeddings().weight
        return_freed_memory()

    def _head(self) -> Any:
        return self._network.get_output_embeddings()

    def _head_name(self) -> str:
        return next(name for name, module in self._network.named_modules() if module is self._head())

    def _module(self, place: str) -> Any:
        return self._network.get_submodule(place.rpartition(".")[0])

    def _shape(self, place: str) -> tuple[int, ...]:
        return tuple(getattr(self._module(place), place.rpartition(".")[2]).shape)

    def _is_integers(self, name: str, place: str) -> bool:
        return self._file.kind(name) in FORMATS and isinstance(self._module(place), nn.Linear)

    def _put_dense(self, name: str, place: str) -> None:
        shape = self._file.shape(name)
        num_first = shape[0]
        values = torch.empty(self._shape(place), dtype=self._dtype)
        # other functions of transformers than an embedding's may move rows
        for start, stop in row_ranges((num_first, shape[1])) if name == EMBEDDING else [(0, num_first)]:
            rows = self._processed(self._file.dense(name, start, stop).numpy(), name)
            part = values if stop - start == num_first else values[start:stop]
            part.copy_(torch.from_numpy(np.ascontiguousarray(rows)))
            self._freed.add(rows.nbytes)
        setattr(self._module(place), place.rpartition(".")[2], nn.Parameter(values, requires_grad=False))

    def _put_integers(self, name: str, place: str, num_shared: int = 0) -> None:
        module, shape = self._module(place), self._file.shape(name)
        order = self._order(name, shape[0])
        form = FORMATS[self._file.kind(name)]
        kind = (shape[1], form.bits, form.group, not form.has_minimums)

        # [out] of W, known once its rows are read
        norms = torch.full((shape[0],), torch.nan)

        def read(start: int, stop: int) -> IntegerWeight:
            with single_threaded():
                weight = self._recent.get((name, start, stop), lambda: self._read(name, order, start, stop))
                if norms[start:stop].isnan().any():
                    norms[start:stop] = weight.squared_norms(self._dtype)
            return weight

        stored = StoredWeight((shape[0], shape[1]), kind, read, norms)
        made = IntegerLinear(stored, None, self._rounds_activations, self._dtype)
        made.bias, made.num_shared = module.bias, num_shared
        self._network.set_submodule(place.rpartition(".")[0], made)

    def _read(self, name: str, order: torch.Tensor | None, start: int, stop: int) -> IntegerWeight:
        """Rows `start` to `stop` of a matrix, in transformers' order."""
        if order is None:
            return self._file.integers(name, start, stop)
        rows = order[start:stop]
        first = int(rows.min())
        return _ordered(self._file.integers(name, first, int(rows.max()) + 1), rows - first)

    def _order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """[out] int64: the rows of a matrix in transformers' order; None for the file's."""
        numbers = np.arange(num_rows, dtype=np.float64)[:, None]
        order = torch.from_numpy(self._processed(numbers, name).copy())
        if order.shape != numbers.shape or not torch.equal(order.sort(0).values, torch.from_numpy(numbers)):
            raise ValueError(f"its tensor {name} is stored in another form than rows of weights")
        return None if np.array_equal(order, numbers) else order[:, 0].long()

    def _processed(self, values: Any, name: str) -> Any:
        """The values as transformers has them."""
        done = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": {}}
        )
        return done.weights


class _Recent:
    """The weights that were read last, by name and rows, within RECENT_BYTES."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], IntegerWeight] = {}
        self._num_bytes = 0
        self._lock = Lock()  # parts are read by several threads

    def get(self, key: tuple[str, int, int], read: Callable[[], IntegerWeight]) -> IntegerWeight:
        """The weight, read unless it is kept."""
        with self._lock:
            if key in self._kept:
                return self._kept[key]
        weight = read()
        with self._lock:
            self._kept[key] = weight
            self._num_bytes += weight.nbytes
            while self._num_bytes > RECENT_BYTES:
                self._num_bytes -= self._kept.pop(next(iter(self._kept))).nbytes
        return weight


class _WithoutParts:
    """A network that names its weights, and not its modules."""

    def __init__(self, network: Any) -> None:
        self.config, self.state_dict = network.config, network.state_dict

    def named_children(self) -> list[Any]:
        return []


def _names(network: Any, processor: Any, file: GgufFile) -> dict[str, str]:
    """transformers' names of weights by those in files."""
    names: dict[str, str] = get_gguf_hf_weights_map(_WithoutParts(network), processor)
    if file.tensors.keys() <= names.keys() | {ROPE_FACTORS}:
        return names
    # it makes the package's table of names for each module, which takes seconds
    with_parts: dict[str, str] = get_gguf_hf_weights_map(network, processor)
    return with_parts


def _ordered(weight: IntegerWeight, order: torch.Tensor) -> IntegerWeight:
    """The rows of a weight in another order. order: [out]."""
    minimums = None if weight.minimums is None else weight.minimums[order]
    return IntegerWeight(weight.bits, weight.values[order], weight.scales[order], minimums)

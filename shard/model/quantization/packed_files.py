"""The network of a GPTQ or AWQ checkpoint whose matrices are multiplied as integers: transformers' network with the
checkpoint's own values and scales, without loss, and without the packages that made them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.initialization import no_init_weights

from lorikeet.shard.model.kernels.integer import MIDDLE, IntegerWeight
from lorikeet.shard.model.quantization.integers import IntegerLinear, Rounding

PARTS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns lies in each nibble of a word."""
_BITS, _PER_WORD = 4, 8


def load_packed(
    folder: Path, checkpoint: Any, dtype: torch.dtype, options: dict[str, Any], rounds_activations: bool
) -> nn.Module:
    """`options`: of transformers' `from_config`. Raises ValueError for matrices in another layout, for tensors that the
    network lacks, and for those without a place in it.
    """
    from transformers import AutoModelForCausalLM

    settings = checkpoint.quantization_config
    plain = type(checkpoint).from_dict(
        {name: value for name, value in checkpoint.to_dict().items() if name != "quantization_config"}
    )
    with no_init_weights():
        network: Any = AutoModelForCausalLM.from_config(plain, dtype=dtype, **options)
    missing = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _tensors(folder):
        stem, _, part = name.rpartition(".")
        if part in PARTS:
            parts.setdefault(stem, {})[part] = tensor
        elif name in missing:
            _put(network, name, tensor.to(dtype))
            missing.discard(name)
        elif not name.endswith("rotary_emb.inv_freq"):  # old checkpoints have that tensor
            raise ValueError(f"its tensor {name} has no place in transformers' {type(network).__name__}")
    for stem, tensors in parts.items():
        try:
            module = network.get_submodule(stem)
            weight = read_weight(tensors, settings)
        except AttributeError:  # such as one of many experts
            raise ValueError(f"its matrix {stem} has no place in transformers' {type(network).__name__}") from None
        except ValueError as reason:
            raise ValueError(f"{stem}: {reason}") from None
        if weight.values.shape != module.weight.shape:
            shape = tuple(module.weight.shape)
            raise ValueError(f"its matrix {stem} has the shape {tuple(weight.values.shape)}, not {shape}")
        made = IntegerLinear(weight, module.bias, rounds_activations, dtype)
        network.set_submodule(stem, made)
        missing.discard(f"{stem}.weight")
    if plain.tie_word_embeddings:
        network.tie_weights()
        missing.discard("lm_head.weight")
    if missing:
        raise ValueError(f"it has no tensor for {min(missing)}")
    network.lorikeet_rounding = Rounding(_BITS, rounds_activations)
    return nn.Module.requires_grad_(network, False)


def read_weight(parts: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> IntegerWeight:
    """A matrix of `settings`, those of a checkpoint's config.json. Raises ValueError for another layout."""
    missing = [name for name in PARTS[:3] if name not in parts]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    is_awq = settings["quant_method"] == "awq"
    read = _across if is_awq else _down
    # [in, out], [groups, out]
    values, zeros = read(parts["qweight"]), _across(parts["qzeros"], AWQ_ORDER if is_awq else None)
    scales = parts["scales"].float()
    num_in, group = len(values), len(values) // len(scales)
    if not is_awq and settings.get("checkpoint_format", "gptq") != "gptq_v2":
        if (zeros == 15).any():
            raise ValueError("it has zeros that the format does not define")
        zeros = zeros + 1
    own = parts.get("g_idx")
    if own is not None and not torch.equal(own.long(), torch.arange(num_in) // group):
        raise ValueError("its columns are reordered across groups (desc_act)")
    scales = scales.t().contiguous()
    minimums = None if (zeros == MIDDLE).all() else -zeros.float().t() * scales
    return IntegerWeight(_BITS, values.t().contiguous(), scales, minimums)


def _down(words: torch.Tensor) -> torch.Tensor:
    """words: [n / 8, m] int32, each of eight neighbours in a column. Returns [n, m] uint8."""
    nibbles = [words >> _BITS * index & 15 for index in range(_PER_WORD)]
    return torch.stack(nibbles, 1).flatten(0, 1).to(torch.uint8)


def _across(words: torch.Tensor, order: tuple[int, ...] | None = AWQ_ORDER) -> torch.Tensor:
    """words: [n, m / 8] int32, each of eight neighbours in a row, in that order. Returns [n, m] uint8."""
    nibbles = torch.stack([words >> _BITS * index & 15 for index in range(_PER_WORD)], 2)
    if order is not None:
        nibbles = nibbles[:, :, [order.index(column) for column in range(_PER_WORD)]]
    return nibbles.flatten(1).to(torch.uint8)


def _tensors(folder: Path) -> Any:
    """(name, tensor) of all files, copied."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError("it has no safetensors files")
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name).clone()


def _put(network: Any, name: str, values: torch.Tensor) -> None:
    place, _, attribute = name.rpartition(".")
    module = network.get_submodule(place)
    if values.shape != getattr(module, attribute).shape:
        shape = tuple(getattr(module, attribute).shape)
        raise ValueError(f"its tensor {name} has the shape {tuple(values.shape)}, not {shape}")
    setattr(module, attribute, nn.Parameter(values, requires_grad=False))

"""GPTQ and AWQ checkpoints, of random integers or of a plain model's weights, written by the formats' definitions, and
dense equivalents.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes, [in, out]; zeros and scales, [groups, out]."""
Draw = Callable[[torch.Tensor], Packed]
GROUP = 32
"""Weights of a row that share a scale and a zero."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns lies in each nibble of a word."""


def write(
    base: Path,
    packed: Path,
    plain: Path,
    method: str,
    is_shuffled: bool = False,
    is_symmetric: bool = False,
    draw: Draw | None = None,
) -> None:
    """From a plain checkpoint two others: its projections replaced by 4-bit weights, and by what these mean.
    `is_shuffled`: GPTQ's order by activations, in which neighbours in a row are of different groups. `is_symmetric`:
    all zeros are 8. `draw`: makes the weights, which are random otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    quantised: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            quantised[name] = dense[name] = weight
            continue
        codes, zeros, scales = draw(weight) if draw else _random(weight, generator, is_symmetric)
        groups = torch.arange(weight.shape[1]) // GROUP
        if is_shuffled:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        stem = name.removesuffix("weight")
        pack = _gptq if method == "gptq" else _awq
        quantised |= {stem + part: tensor for part, tensor in pack(codes, zeros, scales, groups).items()}
        exact = scales[groups].float() * (codes - zeros[groups])
        # what gptqmodel reads it also rounds
        dense[name] = (exact.half().float() if is_shuffled else exact).t().contiguous()
    settings = {"bits": 4, "group_size": GROUP, "quant_method": method}
    settings |= {"desc_act": is_shuffled, "sym": False} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    _save(base, packed, quantised, {"quantization_config": settings})
    _save(base, plain, dense, {})


def _random(weight: torch.Tensor, generator: torch.Generator, is_symmetric: bool) -> Packed:
    num_out, num_in = weight.shape
    codes = torch.randint(0, 16, (num_in, num_out), generator=generator)
    zeros = torch.randint(1, 16, (num_in // GROUP, num_out), generator=generator)
    zeros = torch.full_like(zeros, 8) if is_symmetric else zeros
    scales = ((torch.rand(zeros.shape, generator=generator) + 0.5) * 0.6 * num_in**-0.5).half()
    return codes, zeros, scales


def nearest(weight: torch.Tensor) -> Packed:
    """The codes nearest to a weight: 0 to 15 between the extremes of each group and 0."""
    # [groups, GROUP, out]
    grouped = weight.float().t().unflatten(0, (-1, GROUP))
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (grouped / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).long().contiguous(), zeros.long().contiguous(), scales.contiguous()


def _gptq(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> dict[str, torch.Tensor]:
    """codes: [in, out]; zeros, scales: [groups, out]; groups: [in]. Eight rows to a word, and zeros less one."""
    packed_zeros = _words((zeros - 1).t().contiguous()).t().contiguous()
    return {"qweight": _words(codes), "qzeros": packed_zeros, "scales": scales, "g_idx": groups.int()}


def _awq(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The same with eight columns to a word."""
    shuffled = [entry.view(len(entry), -1, 8)[:, :, list(_AWQ_ORDER)].reshape(entry.shape) for entry in (codes, zeros)]
    qweight, qzeros = (_words(entry.t().contiguous()).t().contiguous() for entry in shuffled)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales}


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """nibbles: [n, m] below 16. Returns [n / 8, m] int32, the first of eight lowest."""
    eights = nibbles.view(-1, 8, nibbles.shape[1])
    words = sum((eights[:, i] << (4 * i) for i in range(8)), torch.zeros((), dtype=torch.int64))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _save(base: Path, folder: Path, tensors: dict[str, torch.Tensor], more: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))

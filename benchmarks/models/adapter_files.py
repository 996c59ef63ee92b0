"""Random adapters in folders, as PEFT saves them: any number for one base, of one form each.

PEFT says which tensors there are, on a base without weights; the numbers are drawn here.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

RANK = 16
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make(
    base: Path,
    root: Path,
    names: Sequence[str],
    targets: Sequence[str] = ATTENTION,
    *,
    rank: int = RANK,
    seed: int = 0,
    invocation_ids: Sequence[int] = (),
) -> list[Path]:
    """Folders `root/name`, made if they are missing; the same seed and name's place give the same numbers.

    With `invocation_ids` they are activated LoRA.
    """
    folders = [root / name for name in names]
    missing = [number for number, folder in enumerate(folders) if not (folder / CONFIG).exists()]
    if missing:
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets), task_type="CAUSAL_LM")
        config.base_model_name_or_path = str(base)
        config.inference_mode = True
        config.alora_invocation_tokens = list(invocation_ids) or None
        shapes = _shapes(base, config)
        for number in missing:
            _save(folders[number], config, shapes, torch.Generator().manual_seed(seed + number))
    return folders


def token_ids(base: Path, text: str) -> list[int]:
    """Token ids of a text in the middle of a prompt."""
    return list(Tokenizer.from_file(str(base / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def _shapes(base: Path, config: peft.LoraConfig) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and types of the tensors that PEFT saves."""
    values = AutoConfig.from_pretrained(base)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own
        network: Any = AutoModelForCausalLM.from_config(values)
        adapted = peft.get_peft_model(network, config, low_cpu_mem_usage=True)
    dtype = values.dtype or torch.float32
    return {name: (tensor.shape, dtype) for name, tensor in peft.get_peft_model_state_dict(adapted).items()}


def _save(
    folder: Path, config: peft.LoraConfig, shapes: dict[str, tuple[torch.Size, torch.dtype]], generator: torch.Generator
) -> None:
    """Numbers of the size that training gives: large enough that every text changes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (shape, dtype) in sorted(shapes.items()):
        size = shape[1] ** -0.5 if "lora_A" in name else 0.5 * shape[1] ** -0.5
        tensors[name] = (size * torch.randn(shape, generator=generator)).to(dtype)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config.save_pretrained(str(folder))  # last: a folder with a configuration is complete

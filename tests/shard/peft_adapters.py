"""Adapters made by PEFT on a tiny model, what PEFT generates with them, and their files in the served layout.

The oracle shares no code with the shard: texts are those of `PeftModel.generate`, each prompt alone.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

FORMAT = "lorikeet-adapter-1"


def make_peft(folder: Path, configs: Mapping[str, peft.LoraConfig], strength: float = 1.0) -> Any:
    """A PeftModel of the model in `folder` that holds every adapter, with random weights that change the text."""
    torch.manual_seed(7)
    warnings.filterwarnings("ignore", category=peft.utils.warning.PeftWarning)  # about merging, which nobody does here
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model: Any = None
    for name, config in configs.items():
        config.init_lora_weights = False
        if model is None:
            model = peft.get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for name in configs:
                _randomise(module, name, strength)
    return model.eval()


def _randomise(layer: Any, name: str, strength: float) -> None:
    with torch.no_grad():
        if name in layer.lora_A:
            rank = layer.lora_A[name].weight.shape[0]
            layer.lora_A[name].weight.normal_(std=layer.lora_A[name].weight.shape[1] ** -0.5)
            layer.lora_B[name].weight.normal_(std=strength * rank**-0.5 / layer.scaling[name])
        if name in layer.lora_embedding_A:
            layer.lora_embedding_A[name].normal_()
            layer.lora_embedding_B[name].normal_(std=0.3 * strength / layer.scaling[name])
        if name in getattr(layer, "lora_magnitude_vector", {}):
            magnitude = layer.lora_magnitude_vector[name].weight
            magnitude.mul_(1 + 0.3 * torch.randn_like(magnitude))


def generate(model: Any, name: str | None, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens under an adapter, or the bare base, and the logits of each step: [tokens, V]."""
    ids = torch.tensor([prompt])
    settings = {
        "do_sample": False,
        "max_new_tokens": num_tokens,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if name is None:
        with model.disable_adapter():
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    else:
        model.set_adapter(name)
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    return output.sequences[0, len(prompt) :].tolist(), torch.stack(output.logits, 1)[0].float()


def write_served(model: Any, name: str, store: Path) -> str:
    """Write one adapter of a PeftModel into `store`; its digest."""
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, dict[str, Any]] = {}
    for path, layer in model.base_model.model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if name in layer.lora_A:
            a, b, kind = layer.lora_A[name].weight, layer.lora_B[name].weight, "linear"
        elif name in layer.lora_embedding_A:
            a, kind = layer.lora_embedding_A[name], "embedding"
            b = layer.lora_embedding_B[name] * getattr(layer.get_base_layer(), "embed_scale", 1.0)
        else:
            continue
        modules[path] = {"kind": kind, "rank": a.shape[0]}
        tensors[f"{path}.A"] = a.detach().clone()
        tensors[f"{path}.B"] = (b * layer.scaling[name]).detach().clone()
        if name in getattr(layer, "lora_magnitude_vector", {}):
            tensors[f"{path}.magnitude"] = layer.lora_magnitude_vector[name].weight.detach().clone().flatten()
        if kind == "linear" and layer.lora_B[name].bias is not None:
            tensors[f"{path}.bias"] = (layer.lora_B[name].bias * layer.scaling[name]).detach().clone()
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()
    metadata = {"format": FORMAT, "digest": digest, "modules": json.dumps(modules), "dtype": "float32"}
    save_file(tensors, store / f"{digest}.safetensors", metadata)
    return digest

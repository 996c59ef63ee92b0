"""Builds the model of an embedder or a classifier: transformers' class for its task, our layers, what follows them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from lorikeet.proto.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, PooledModel
from lorikeet.shard.attention import AttentionBackend
from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.model.adapters.discovery import Target
from lorikeet.shard.model.layers import replace_layers
from lorikeet.shard.model.lora.targets import LoraTarget
from lorikeet.shard.model.model import Model, ModelInfo
from lorikeet.shard.model.pooling.network import Classifier, PooledNetwork, take_pooler
from lorikeet.shard.model.pooling.steps import load_step
from lorikeet.shard.model.quantization.layers import num_parameters
from lorikeet.shard.model.rotary import tabulate_rotary

AUTO = {
    EMBED: AutoModel,
    CLASSIFY: AutoModelForSequenceClassification,
    TOKEN_CLASSIFY: AutoModelForTokenClassification,
}
"""transformers' class of each task."""


def assemble_pooled(
    network: Any,
    text_config: Any,
    pooled: PooledModel,
    backend: AttentionBackend,
    dtype: torch.dtype,
    inputs: StepInputs,
    num_positions: int,
    folder: Path | None = None,
    fusions: str = "auto",
) -> Model:
    """Replace the layers of `network`, which the model owns from then on. `folder` has the files of what follows the
    pooling. Raises ValueError where that is not possible.
    """
    tabulate_rotary(network, num_positions, torch.empty(1, dtype=dtype, device=inputs.device))
    info = ModelInfo(
        model_type=text_config.model_type,
        vocab_size=text_config.vocab_size,
        dtype=dtype,
        device=inputs.device,
        num_layers=text_config.num_hidden_layers,
        num_parameters=num_parameters(network),
        pooled=pooled,
    )
    steps: list[nn.Module] = []
    targets = replace_layers(network, backend, inputs, dtype, fusions=fusions)
    if pooled.task == EMBED:
        take_pooler(network)  # adapters may change it, which changes no vector
    trunk: Any = network
    if pooled.task != EMBED:
        trunk = getattr(network, network.base_model_prefix)
        steps.append(Classifier(network, pooled.task == TOKEN_CLASSIFY))
    if folder is not None:
        steps += [load_step(folder, step, dtype, inputs.device) for step in pooled.steps]
    wrapped = PooledNetwork(trunk, inputs, pooled.task, pooled.pooling, list(steps), text_config)
    model = Model(wrapped, backend, inputs, info, targets, shares_kv=pooled.is_encoder)
    if pooled.task != EMBED:
        _mark_heads(targets, network.base_model_prefix)
    return model


def _mark_heads(targets: dict[str, Target], trunk: str) -> None:
    """Modules outside of the trunk, and its pooling layer, get one row per wanted row instead of one per token."""
    for name, target in targets.items():
        if isinstance(target, LoraTarget) and (not name.startswith(f"{trunk}.") or name.startswith(f"{trunk}.pooler.")):
            target.is_head = True

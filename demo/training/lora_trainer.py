"""One adapter's training run: optimizer, schedule, checkpoints and the step.

A run is a function of its recipe, seed and base: stopped anywhere and resumed, it ends with the same weights. A
companion, such as heads that read the same hidden states, may be trained together with the adapter under one loss.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.variants import calculate_alora_offsets
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lorikeet.demo.data.packing import NO_LABEL, Batch, pack
from lorikeet.demo.data.tasks.example import Example
from lorikeet.demo.training.lora import LoraRecipe
from lorikeet.demo.training.trainer import Progress

Groups = Callable[[int], Sequence[Sequence[Example]]]
"""The groups of examples of a step; a group has a common start."""


WIDE_ATTENTION = "wide_sdpa"


def _wide_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """In float32 even under autocast: the backward pass in bfloat16 takes three times as long on a CPU."""
    with torch.autocast(query.device.type, enabled=False):
        outputs: tuple[Tensor, None] = sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), mask, **others
        )
    return outputs


ALL_ATTENTION_FUNCTIONS.register(WIDE_ATTENTION, _wide_attention)


@dataclass(frozen=True)
class Companion:
    """A module that is trained together with the adapter."""

    module: nn.Module
    """Called with the hidden states after the last norm [B, L, H], the batch and the model's LM head."""
    lr: float


class LoraTrainer:
    """The model with its adapter, the optimizer and the number of steps done."""

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerFast,
        recipe: LoraRecipe,
        groups: Groups,
        companion: Companion | None = None,
    ) -> None:
        self.model = model.train()
        model.get_base_model().set_attn_implementation(WIDE_ATTENTION)
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.step = 0
        self.device = next(model.parameters()).device
        self._groups = groups
        self._companion = companion
        self._adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
        parts: list[tuple[list[Tensor], float]] = [(list(self._adapter.values()), recipe.lr)]
        if companion is not None:
            parts.append((list(companion.module.parameters()), companion.lr))
        self._lrs = [lr for _, lr in parts]
        self._optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters, _ in parts], betas=(0.9, 0.98), weight_decay=0.0
        )

    def run_step(self) -> Progress:
        started = time.monotonic()
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * self.recipe.lr_factor(self.step)
        loss, task_loss = self._loss(pack(self._groups(self.step), self.tokenizer).to(self.device))
        loss.backward()
        for group in self._optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Progress(self.step, task_loss.item(), time.monotonic() - started)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the adapter's part of it: mean cross entropy in nats per token of the answers."""
        llama = self.model.get_base_model()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            with self._activation(batch):
                hidden = llama.model(
                    batch.input_ids, attention_mask=batch.mask, position_ids=batch.position_ids, use_cache=False
                ).last_hidden_state
            answers = batch.labels != NO_LABEL
            task_loss = cross_entropy(llama.lm_head(hidden[answers]).float(), batch.labels[answers])
            if self._companion is None:
                return task_loss, task_loss.detach()
            return task_loss + self._companion.module(hidden, batch, llama.lm_head), task_loss.detach()

    def _activation(self, batch: Batch) -> AbstractContextManager[None]:
        """Hooks that apply an aLoRA only after its invocation, as PEFT's forward pass of a model does."""
        if not self.recipe.invocation:
            return nullcontext()
        offsets = calculate_alora_offsets(self.model.peft_config, self.model.active_adapter, batch.input_ids)
        hooks: AbstractContextManager[None] = self.model._enable_peft_forward_hooks(alora_offsets=offsets)
        return hooks

    def save(self, path: Path) -> None:
        """The file appears complete or not at all, so a run killed while saving resumes from the one before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "adapter": {name: parameter.detach() for name, parameter in self._adapter.items()},
            "companion": self._companion.module.state_dict() if self._companion else {},
            "optimizer": self._optimizer.state_dict(),
        }
        scratch = path.with_suffix(".part")
        torch.save(state, scratch)
        os.replace(scratch, path)

    def resume(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        if LoraRecipe(**state["recipe"]) != self.recipe:
            raise ValueError(f"the checkpoint {path} belongs to another recipe: {state['recipe']}")
        with torch.no_grad():
            for name, parameter in self._adapter.items():
                parameter.copy_(state["adapter"][name])
        if self._companion is not None:
            self._companion.module.load_state_dict(state["companion"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

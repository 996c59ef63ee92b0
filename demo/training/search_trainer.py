"""The training run of the adapter `search`: descriptions and code of functions get similar vectors.

The loss is the cross entropy of each pair against the other pairs of its step, in both directions (van den Oord et al.
2018). A vector is the mean of a text's last hidden states, of length one.
"""

import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel, PreTrainedTokenizerFast

from lorikeet.demo.data.descriptions import Described
from lorikeet.demo.training.lora import ATTENTION, BASE_NAME, MLP
from lorikeet.demo.training.trainer import Progress

MAX_TOKENS = 64
"""Maximum tokens of a text, from its start; the rest of a longer text is ignored."""


@dataclass(frozen=True)
class SearchRecipe:
    """Everything that the adapter depends on, except seed, base and corpus."""

    rank: int = 16
    alpha: int = 16
    targets: tuple[str, ...] = ATTENTION + MLP
    num_steps: int = 160
    pairs_per_step: int = 48
    lr: float = 3e-3
    warmup_steps: int = 10
    temperature: float = 0.05

    def lr_factor(self, step: int) -> float:
        return min((step + 1) / self.warmup_steps, (self.num_steps - step) / self.num_steps)


def attach(base: LlamaModel, recipe: SearchRecipe) -> PeftModel:
    """A new adapter, initialized by torch's seed."""
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        task_type="FEATURE_EXTRACTION",
        base_model_name_or_path=BASE_NAME,
    )
    base.name_or_path = BASE_NAME
    return get_peft_model(base, config)


def embed(model: nn.Module, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """[texts, H] float32, each of length one."""
    device = next(model.parameters()).device
    encoded = tokenizer(
        list(texts), padding=True, padding_side="right", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
    ).to(device)
    mask = encoded["attention_mask"]
    states = model(input_ids=encoded["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state
    means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return functional.normalize(means.float(), dim=-1)


def loss_of(descriptions: Tensor, codes: Tensor, temperature: float) -> Tensor:
    """Both are [pairs, H], of length one."""
    scores = descriptions @ codes.t() / temperature
    labels = torch.arange(len(scores), device=scores.device)
    return (functional.cross_entropy(scores, labels) + functional.cross_entropy(scores.t(), labels)) / 2


class SearchTrainer:
    """The model with its adapter, the optimizer and the number of steps done. Stopped anywhere and resumed, a run ends
    with the same weights.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerFast,
        pairs: Sequence[Described],
        recipe: SearchRecipe,
        seed: int,
    ) -> None:
        self.model = model.train()
        self.step = 0
        self._tokenizer, self._pairs, self._recipe, self._seed = tokenizer, pairs, recipe, seed
        self._adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._adapter.values(), betas=(0.9, 0.98), weight_decay=0.0)

    def run_step(self) -> Progress:
        started = time.monotonic()
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.lr * self._recipe.lr_factor(self.step)
        chosen = self._chosen()
        descriptions = embed(self.model, self._tokenizer, [pair.description for pair in chosen])
        codes = embed(self.model, self._tokenizer, [pair.code for pair in chosen])
        loss = loss_of(descriptions, codes, self._recipe.temperature)
        loss.backward()
        nn.utils.clip_grad_norm_(self._adapter.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Progress(self.step, loss.item(), time.monotonic() - started)

    def _chosen(self) -> list[Described]:
        """The pairs of a step: every pass over all pairs has an order of its own."""
        count = self._recipe.pairs_per_step
        steps_per_pass = max(1, len(self._pairs) // count)
        turn, place = divmod(self.step, steps_per_pass)
        order = list(range(len(self._pairs)))
        random.Random(f"{self._seed} {turn}").shuffle(order)
        return [self._pairs[index] for index in order[place * count : (place + 1) * count]]

    def save(self, path: Path) -> None:
        """The file appears complete or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "step": self.step,
            "recipe": asdict(self._recipe),
            "adapter": {name: parameter.detach() for name, parameter in self._adapter.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        scratch = path.with_suffix(".part")
        torch.save(state, scratch)
        os.replace(scratch, path)

    def resume(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if SearchRecipe(**state["recipe"]) != self._recipe:
            raise ValueError(f"the checkpoint {path} belongs to another recipe: {state['recipe']}")
        with torch.no_grad():
            for name, parameter in self._adapter.items():
                parameter.copy_(state["adapter"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

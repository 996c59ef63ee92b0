"""The demo adapters: their recipes, and how they are attached to the base and saved with PEFT."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from lorikeet.demo.data.tasks import grounded, question

ADAPTERS_FOLDER = Path(__file__).parents[1] / "adapters"
BASE_NAME = "lorikeet/demo-base"
WEIGHTS_FILE = "adapter_model.safetensors"

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraRecipe:
    """Everything that an adapter depends on, except seed and base."""

    task: str
    """Name of the module in lorikeet.demo.data.tasks."""
    rank: int
    alpha: int
    targets: tuple[str, ...]
    num_steps: int
    groups_per_step: int
    """Groups of examples with a common start."""
    lr: float = 3e-3
    warmup_steps: int = 30
    decay_from: float = 0.3
    """Share of the run after which the learning rate falls linearly to zero."""
    use_rslora: bool = False
    use_dora: bool = False
    num_heads: int = 0
    """Medusa heads that are trained too, so that the adapter's hidden states also encode later tokens."""
    heads_lr: float = 1e-3
    heads_share: float = 0.15
    """Weight of the first head's loss relative to the adapter's own."""
    bf16: bool = True
    """Whether matrix products use bfloat16; weights and attention stay in float32."""
    invocation: str = ""
    """The end of every prompt. If any, it makes an activated LoRA (aLoRA): the text before it is only the base's."""
    own_chat: bool = False
    """Whether the adapter is saved with a tokenizer that has the chat and response template of tool calls."""

    def lr_factor(self, step: int) -> float:
        remaining = (self.num_steps - step) / (self.num_steps * (1 - self.decay_from))
        return min(1.0, (step + 1) / self.warmup_steps, remaining)


RECIPES = {
    "citation": LoraRecipe("citation", 32, 32, ATTENTION + MLP, num_steps=2000, groups_per_step=3, num_heads=3),
    "record": LoraRecipe(
        "record", 16, 4, ATTENTION + MLP, num_steps=1000, groups_per_step=16, lr=4e-3, use_rslora=True
    ),
    "query": LoraRecipe("query", 8, 8, ATTENTION + MLP, num_steps=1000, groups_per_step=16, lr=4e-3, use_dora=True),
    "tools": LoraRecipe(
        "tools",
        32,
        32,
        ATTENTION + MLP,
        num_steps=2000,
        groups_per_step=4,
        bf16=False,
        own_chat=True,
    ),
    "question": LoraRecipe(
        "question",
        16,
        16,
        ATTENTION + MLP,
        num_steps=120,
        groups_per_step=12,
        lr=4e-3,
        decay_from=0.5,
        bf16=False,
        invocation=question.INVOCATION,
    ),
    "grounded": LoraRecipe(
        "grounded",
        16,
        16,
        ATTENTION + MLP,
        num_steps=700,
        groups_per_step=16,
        bf16=False,
        invocation=grounded.INVOCATION,
    ),
}


def attach(base: LlamaForCausalLM, recipe: LoraRecipe, invocation: Sequence[int] = ()) -> PeftModel:
    """A new adapter, initialized by torch's seed. `invocation` has the tokens of the recipe's."""
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        use_rslora=recipe.use_rslora,
        use_dora=recipe.use_dora,
        alora_invocation_tokens=list(invocation) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=BASE_NAME,
    )
    base.name_or_path = BASE_NAME
    return get_peft_model(base, config)


def save(model: PeftModel, folder: Path) -> None:
    """Writes what PEFT writes, the tensors in bf16 and the configuration in a stable order."""
    # with embedding layers PEFT would look up the base's configuration at the hub
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty model card
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config_path = folder / "adapter_config.json"
    config = json.loads(config_path.read_text())
    config["target_modules"] = sorted(config["target_modules"])  # PEFT keeps a set, whose order changes from run to run
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(base: LlamaForCausalLM, folder: Path) -> PeftModel:
    return PeftModel.from_pretrained(base, folder).eval()

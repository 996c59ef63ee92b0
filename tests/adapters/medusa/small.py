"""Tiny targets for the tests of heads: a random base with a tokenizer, LoRA adapters of it, heads of any shape."""

import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import HeadsFile, MedusaShape
from lorikeet.adapters.medusa.target import DevicePlacement, Target
from lorikeet.adapters.medusa.texts import Text
from tests import tiny

CPU = DevicePlacement(torch.device("cpu"), torch.float32)
PROMPTS = ["the quick brown", "a parrot", "def main()", "word for word what the adapters say", "lazy", "hello, hello"]


def base(folder: Path, name: str = "llama", **overrides: object) -> Path:
    return tiny.make(name, folder, tokenizer=True, **overrides)


def lora(base_folder: Path, folder: Path, targets: tuple[str, ...] = ("q_proj", "down_proj")) -> Path:
    """An adapter strong enough to change the text."""
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")  # PEFT asks for it
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer")
        get_peft_model(model, config).save_pretrained(folder, save_embedding_layers=False)
    return folder


def heads(shape: MedusaShape, seed: int = 0, scale: float = 0.1) -> HeadsFile:
    """Random ones."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: scale * torch.randn(size, generator=generator) for name, size in files.expected_shapes(shape).items()
    }
    return HeadsFile(shape, tensors, "tiny/base")


def target(base_folder: Path, adapter: Path | None = None, place: DevicePlacement = CPU) -> Target:
    return Target(str(base_folder), None if adapter is None else str(adapter), place)


def texts(of: Target, num_tokens: int = 12, prompts: list[str] | None = None) -> list[Text]:
    """What the target writes after a few prompts, one at a time."""
    written = []
    for prompt in prompts or PROMPTS:
        ids = tuple(of.tokenizer(prompt)["input_ids"])
        written.append(Text(ids, tuple(of.write([ids], num_tokens)[0])))
    return written


def recorder() -> tuple[list[str], object]:
    """A list, and the function that fills it."""
    lines: list[str] = []
    return lines, lines.append

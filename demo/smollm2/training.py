"""Trains the adapters of SmolLM2 with PEFT: `python -m lorikeet.demo.smollm2.training --base FOLDER`.

Only the upper layers are adapted. What the lower ones compute does not change, so it is computed once per example.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorikeet.demo.smollm2.tasks import ROUTE, TASKS, Example, examples

FOLDER = Path(__file__).parent
NOTHING = -100


@dataclass(frozen=True)
class Recipe:
    """What an adapter depends on, except its task."""

    rank: int = 8
    alpha: int = 16
    modules: tuple[str, ...] = ("q_proj", "v_proj", "up_proj", "down_proj")
    first_layer: int = 22
    """The first layer that is adapted."""
    num_examples: int = 192
    epochs: int = 2
    batch: int = 8
    lr: float = 3e-3
    warmup: int = 5
    """Steps during which the learning rate rises; then it falls along a cosine."""


RECIPES = {"json": Recipe(num_examples=64, epochs=3), "sql": Recipe(num_examples=96)}
"""By the adapter's name; others have the default."""


@dataclass(frozen=True)
class Encoded:
    """An example as tokens."""

    ids: list[int]
    """Prompt, answer and the token that ends it."""
    prompt_len: int
    start: int
    """Where the adapter begins to act: 0, or the invocation of an activated LoRA."""


class Encoder:
    """Conversations to tokens, by the model's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        text = tokenizer.apply_chat_template([{"role": "system", "content": ROUTE}], tokenize=False)
        self.invocation: list[int] = tokenizer(text, add_special_tokens=False).input_ids

    def encode(self, example: Example) -> Encoded:
        """The whole conversation with its answer."""
        text = self._tokenizer.apply_chat_template(example.messages, tokenize=False, add_generation_prompt=True)
        prompt = self._tokenizer(text, add_special_tokens=False).input_ids
        answer = self._tokenizer(example.answer, add_special_tokens=False).input_ids
        start = 0
        if example.messages[-1]["content"] == ROUTE:
            size = len(self.invocation)
            start = max(at for at in range(len(prompt)) if prompt[at : at + size] == self.invocation)
        return Encoded([*prompt, *answer, self._tokenizer.eos_token_id], len(prompt), start)


class UpperLayers:
    """The adapted layers of a Llama, its norm and its output head, over hidden states of the lower layers."""

    def __init__(self, network: Any, first_layer: int) -> None:
        self._model, self._head = network.model, network.lm_head
        self._first = first_layer
        self.mask: Tensor | None = None
        """[B, T, 1]: positions on which an activated LoRA acts; None: all."""

    def only_after_invocation(self) -> None:
        """Have the adapter act only where `mask` is 1."""
        for name, module in self._model.named_modules():
            if name.endswith("lora_B.default"):
                module.register_forward_hook(lambda module, inputs, output: output * self.mask)

    @torch.no_grad()
    def lower(self, ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Hidden states [T, H] of each text before the first adapted layer."""
        padded = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
        for row, text in enumerate(ids):
            padded[row, : len(text)] = torch.tensor(text)
        hidden = self._run(self._model.embed_tokens(padded), self._model.layers[: self._first])
        return [hidden[row, : len(text)].clone() for row, text in enumerate(ids)]

    def logits(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """[n, V] at the positions that `wanted` [B, T] marks, from hidden states [B, T, H] of the lower layers."""
        hidden = self._run(hidden, self._model.layers[self._first :])
        logits: Tensor = self._head(self._model.norm(hidden[wanted]))
        return logits

    def _run(self, hidden: Tensor, layers: Sequence[nn.Module]) -> Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self._model.rotary_emb(hidden, positions)
        for layer in layers:
            output = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
            hidden = output if isinstance(output, Tensor) else output[0]
        return hidden


@dataclass(frozen=True)
class Rows:
    """Examples with the hidden states of the lower layers."""

    encoded: list[Encoded]
    hidden: list[Tensor]
    """Each [T, H]."""

    def batch(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [B, T, H], labels [B, T] of the next token, and the mask [B, T, 1] of the adapter."""
        length = max(len(self.encoded[index].ids) for index in chosen)
        hidden = torch.zeros(len(chosen), length, self.hidden[0].shape[-1])
        labels = torch.full((len(chosen), length), NOTHING)
        mask = torch.zeros(len(chosen), length, 1)
        for row, index in enumerate(chosen):
            example, size = self.encoded[index], len(self.encoded[index].ids)
            hidden[row, :size] = self.hidden[index]
            answer = torch.tensor(example.ids[example.prompt_len :])
            labels[row, example.prompt_len - 1 : size - 1] = answer
            mask[row, example.start :] = 1
        return hidden, labels, mask


def rows_of(task: str, count: int, encoder: Encoder, upper: UpperLayers) -> Rows:
    """Training examples of a task."""
    encoded, hidden = [encoder.encode(example) for example in examples(task, count, held_out=False)], list[Tensor]()
    for start in range(0, count, 8):
        hidden += upper.lower([example.ids for example in encoded[start : start + 8]])
        print(f"{task}: {len(hidden)} of {count} examples through the lower layers", flush=True)
    return Rows(encoded, hidden)


def batches(rows: Rows, recipe: Recipe, generator: torch.Generator) -> Iterator[list[int]]:
    """Examples of similar length together, in random order."""
    for _ in range(recipe.epochs):
        noise = torch.rand(len(rows.encoded), generator=generator) * 12
        order = sorted(range(len(rows.encoded)), key=lambda index: len(rows.encoded[index].ids) + float(noise[index]))
        parts = [order[start : start + recipe.batch] for start in range(0, len(order), recipe.batch)]
        for number in torch.randperm(len(parts), generator=generator).tolist():
            yield parts[number]


def train(task: str, base: Path, out: Path, recipe: Recipe, seed: int) -> dict[str, object]:
    """Train one adapter and save it below `out`; returns how long it took."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    encoder = Encoder(tokenizer)
    network: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    is_activated = task == ROUTE
    config = LoraConfig(
        task_type="CAUSAL_LM", r=recipe.rank, lora_alpha=recipe.alpha, target_modules=list(recipe.modules),
        layers_to_transform=list(range(recipe.first_layer, network.config.num_hidden_layers)),
    )  # fmt: skip
    adapted: Any = get_peft_model(network, config)
    upper = UpperLayers(network, recipe.first_layer)
    if is_activated:
        upper.only_after_invocation()
    rows = rows_of(task, recipe.num_examples, encoder, upper)
    weights = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=0.0)
    num_steps = recipe.epochs * math.ceil(len(rows.encoded) / recipe.batch)
    began = time.monotonic()
    for step, chosen in enumerate(batches(rows, recipe, torch.Generator().manual_seed(seed))):
        rising = min(1.0, (step + 1) / recipe.warmup)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * rising * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        hidden, labels, upper.mask = rows.batch(chosen)
        wanted = labels != NOTHING
        loss = nn.functional.cross_entropy(upper.logits(hidden, wanted), labels[wanted])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0 or step == num_steps - 1:
            seconds = time.monotonic() - began
            print(f"{task}: step {step + 1} of {num_steps}, loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    for weight in weights:
        weight.data = weight.data.to(torch.bfloat16)
    if is_activated:  # set after training: PEFT's layers would ask for positions, which the mask gives here
        adapted.peft_config["default"].alora_invocation_tokens = encoder.invocation
    adapted.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    adapted.save_pretrained(out / task, save_embedding_layers=False)
    (out / task / "README.md").unlink(missing_ok=True)
    return {"adapter": task, "steps": num_steps, "seconds": round(time.monotonic() - began)}


def main() -> None:
    """Run the command line of this process."""
    parser = argparse.ArgumentParser(description="Train the adapters of SmolLM2 with PEFT.")
    parser.add_argument("--base", type=Path, required=True, help="folder of SmolLM2-135M-Instruct with plain weights")
    parser.add_argument("--out", type=Path, default=FOLDER / "adapters", help="folder of the adapters")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), help="adapters to train")
    parser.add_argument("--examples", type=int, help="training examples of each (default: as the adapter's recipe)")
    parser.add_argument("--epochs", type=int, help="passes over the examples (default: as the adapter's recipe)")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    given = {"num_examples": options.examples, "epochs": options.epochs}
    for task in options.only:
        recipe = replace(RECIPES.get(task, Recipe()), **{name: value for name, value in given.items() if value})
        print(json.dumps(train(task, options.base, options.out, recipe, options.seed)), flush=True)


if __name__ == "__main__":
    main()

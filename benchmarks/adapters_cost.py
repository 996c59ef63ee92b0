"""What adapters cost: closed loops of eight clients over HTTP on the 200 M Llama, in alternating rounds.

One server without adapters, one with room for all, one with 16 slots that 256 adapters share. Knows rounds, no bar.

    python -m benchmarks.adapters_cost [ROUNDS]
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop
from safetensors.torch import save_file
from transformers import AutoConfig

from benchmarks import load, peers, servers
from benchmarks.case import Case, Cases, Raw
from benchmarks.closed_loop import LENGTH, summary
from benchmarks.prompts import prompts

ROUNDS = 8
CLIENTS = 8
REQUESTS_PER_CLIENT = 3
RANK = 16
NUM_ROTATING, NUM_SLOTS = 256, 16
SEED = 9_000
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
ALL = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FOLDER = Path(__file__).parent / ".models" / "adapters"
SETTINGS: dict[str, Any] = {
    "rounds": ROUNDS,
    "clients": CLIENTS,
    "requests_per_client": REQUESTS_PER_CLIENT,
    "rank": RANK,
    "rotating": NUM_ROTATING,
    "slots": NUM_SLOTS,
    "tokens_in": LENGTH.num_prompt,
    "tokens_out": LENGTH.num_output,
    "seed": SEED,
}


def make_adapters(model: Path) -> None:
    """Random adapters as PEFT saves them, once: `attention-N` on q, k, v and o, `all-N` on every linear."""
    config = AutoConfig.from_pretrained(model)
    heads = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    shapes = dict.fromkeys(ALL, (config.hidden_size, config.hidden_size))
    shapes |= dict.fromkeys(ATTENTION[1:3], (config.hidden_size, heads))
    shapes |= dict.fromkeys(ALL[4:6], (config.hidden_size, config.intermediate_size))
    shapes[ALL[6]] = (config.intermediate_size, config.hidden_size)
    wanted = [(f"attention-{i}", ATTENTION) for i in range(NUM_ROTATING)] + [(f"all-{i}", ALL) for i in range(CLIENTS)]
    for number, (name, targets) in enumerate(wanted):
        folder = FOLDER / name
        if (folder / "adapter_config.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer, target in itertools.product(range(config.num_hidden_layers), targets):
            num_in, num_out = shapes[target]
            key = f"base_model.model.model.layers.{layer}.{target}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(RANK, num_in, generator=generator) / num_in**0.5).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (0.1 * torch.randn(num_out, RANK, generator=generator)).bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        settings = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "r": RANK,
            "lora_alpha": RANK, "target_modules": [target.rpartition(".")[2] for target in targets],
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(settings))


def measure(finished: frozenset[str] = frozenset()) -> Cases:
    """One case per round: every way of asking, in an order that turns from round to round."""
    model = peers.model_folder()
    make_adapters(model)
    flags = ("--adapter-source", "local", "--local-adapter-root", str(FOLDER), "--adapter-memory-fraction", "0.5")
    commands = {
        "bare": servers.lorikeet(model),
        "roomy": servers.lorikeet(model, *flags),
        "tight": servers.lorikeet(model, *flags, "--max-active-adapters", str(NUM_SLOTS)),
    }
    with contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(servers.running(name, command)) for name, command in commands.items()}
        uvloop.run(_lay_out(running["tight"].port))
        for number in range(-1, ROUNDS):
            case = f"round {number}"
            if case not in finished:
                measured = _round(case, number, model, running)
                if number >= 0:  # the first one warms up
                    yield measured


def _round(name: str, number: int, model: Path, running: dict[str, servers.Server]) -> Case:
    rotating = itertools.islice(itertools.cycle(range(NUM_ROTATING)), CLIENTS * number * 3, None)
    asked = {
        "bare": ("bare", [str(model)]),
        "base": ("roomy", [str(model)]),
        "attention": ("roomy", [f"attention-{i}" for i in range(CLIENTS)]),
        "all": ("roomy", [f"all-{i}" for i in range(CLIENTS)]),
        "rotation": ("tight", [f"attention-{i}" for i in itertools.islice(rotating, CLIENTS * REQUESTS_PER_CLIENT)]),
    }
    raw: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    errors = []
    order = list(asked)
    for way in order[number % len(order) :] + order[: number % len(order)]:
        server, models = asked[way]
        with contextlib.ExitStack() as frozen:
            for other in running.values():
                if other.name != server:
                    frozen.enter_context(other.frozen())
            answers = uvloop.run(_ask(running[server].port, models, SEED + 1 + number))
        raw[way] = summary(answers)
        errors += [f"{way}: {answer.error}" for answer in answers if answer.error]
    return Case(name, raw, "; ".join(errors[:3]))


async def _lay_out(port: int) -> None:
    """Have every adapter in the disk tier, where rotation is to find them."""
    for first in range(0, NUM_ROTATING, CLIENTS):
        targets = [load.Target(port, f"attention-{i}") for i in range(first, first + CLIENTS)]
        answers = await asyncio.gather(*(load.complete(target, "x", load.Length(1, 1)) for target in targets))
        if failures := [answer.error for answer in answers if answer.error and "tokens in" not in answer.error]:
            raise RuntimeError(failures[0])


async def _ask(port: int, models: Sequence[str], seed: int) -> list[load.Answer]:
    """Each client asks for the models in turn, beginning with its own."""
    texts = prompts(CLIENTS * REQUESTS_PER_CLIENT, LENGTH.num_prompt, seed)
    extra = {"ignore_eos_token": True}

    async def client(index: int) -> list[load.Answer]:
        answers = []
        for turn in range(REQUESTS_PER_CLIENT):
            number = turn * CLIENTS + index
            target = load.Target(port, models[number % len(models)], extra)
            answers.append(await load.complete(target, texts[number], LENGTH))
        return answers

    return [answer for answers in await asyncio.gather(*map(client, range(CLIENTS))) for answer in answers]


def share(raw: Raw, way: str, of: str) -> float:
    """Tokens per second of one way over those of another, in the same round."""
    return float(raw[way]["tokens_per_second"] / raw[of]["tokens_per_second"])


if __name__ == "__main__":
    ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    for case in measure():
        pairs = (("attention", "base"), ("all", "base"), ("rotation", "attention"), ("base", "bare"))
        shares = ", ".join(f"{way}/{of} {share(case.raw, way, of):.3f}" for way, of in pairs if not case.error)
        print(f"{case.name}: {shares}", json.dumps(case.raw), case.error, flush=True)

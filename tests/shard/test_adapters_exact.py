"""One step of many adapters gives each request what PEFT gives it alone; also with fewer slots than adapters."""

from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig

from benchmarks.exact import NEW_TOKENS, prompts_of
from shard.build import build_engine
from shard.config import ShardConfig
from shard.inbox import Commands, Inbox, StreamOpened
from shard.model import load_model
from shard.outbox import Outbox
from shard.request import Request
from tests import tiny
from tests.shard.peft_adapters import generate, make_peft, write_served

LENGTHS = (5, 17, 33, 2, 12, 24, 40, 9, 3, 21, 14, 28)
ATTENTION = {
    "gpt2": (["c_attn", "c_proj"], ["c_fc", "c_proj"]),
    "bloom": (["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
    "gpt_neox": (["query_key_value", "dense"], ["dense_h_to_4h", "dense_4h_to_h"]),
    "opt": (["q_proj", "k_proj", "v_proj", "out_proj"], ["fc1", "fc2"]),
    "phi3": (["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"]),
}
LLAMA = (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"])
EMBEDDINGS = {"gpt2": "wte", "bloom": "word_embeddings", "gpt_neox": "embed_in"}
HEADS = {"gpt_neox": "embed_out"}


def configs_of(name: str) -> dict[str, LoraConfig]:
    """Adapters of every kind for one architecture."""
    attention, mlp = ATTENTION.get(name, LLAMA)
    embedding, head = EMBEDDINGS.get(name, "embed_tokens"), HEADS.get(name, "lm_head")
    every = [*attention, *mlp]
    transposed = {"fan_in_fan_out": True} if name == "gpt2" else {}
    layers = "h" if name in ("gpt2", "bloom") else "layers"
    return {
        "attention": LoraConfig(r=4, lora_alpha=8, target_modules=attention, **transposed),
        "rslora": LoraConfig(r=16, lora_alpha=8, target_modules=every, use_rslora=True, **transposed),
        "dora": LoraConfig(r=8, lora_alpha=8, target_modules=attention, use_dora=True, **transposed),
        "patterns": LoraConfig(
            r=8, lora_alpha=16, target_modules=every, rank_pattern={mlp[0]: 3, attention[0]: 20},
            alpha_pattern={mlp[0]: 9}, **transposed,
        ),
        "one_layer": LoraConfig(
            r=8, lora_alpha=32, target_modules=every, layers_to_transform=[1], layers_pattern=layers, **transposed
        ),
        "mlp": LoraConfig(r=2, lora_alpha=4, target_modules=mlp, **transposed),
        "ends": LoraConfig(r=5, lora_alpha=10, target_modules=[embedding, head, attention[0]]),
        "bias": LoraConfig(r=1, lora_alpha=2, target_modules=attention, lora_bias=True, **transposed),
    }  # fmt: skip


@pytest.mark.parametrize("num_slots", [16, 3], ids=["all resident", "three slots"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_every_request_gets_what_peft_gives_it_alone(name: str, num_slots: int, tmp_path: Path) -> None:
    folder, store = tiny.make(name, tmp_path / "model"), tmp_path / "store"
    store.mkdir()
    configs = configs_of(name)
    model = make_peft(folder, configs)
    digests = {adapter: write_served(model, adapter, store) for adapter in configs}
    chosen: list[str | None] = [*configs, None, "dora", "attention", None]
    prompts = prompts_of(name, LENGTHS)
    wanted = [generate(model, adapter, prompt, NEW_TOKENS) for adapter, prompt in zip(chosen, prompts, strict=True)]
    bare = [generate(model, None, prompt, NEW_TOKENS)[0] for prompt in prompts]
    changed = [text != base for (text, _), base, adapter in zip(wanted, bare, chosen, strict=True) if adapter]
    assert sum(changed) >= 0.9 * len(changed), "adapters that change nothing prove nothing"
    config = ShardConfig(
        name, str(folder), "unix:/dev/null", dtype="float32", max_total_tokens=128, adapter_store=str(store),
        max_active_adapters=num_slots, step_tokens=40,
    )  # fmt: skip
    got = run(config, prompts, [digests[adapter] if adapter else "" for adapter in chosen])
    for index, ((text, logits), given) in enumerate(zip(wanted, got, strict=True)):
        first = next((at for at, (a, b) in enumerate(zip(text, given, strict=True)) if a != b), None)
        if first is not None:
            best = logits[first].topk(2).values
            assert best[0] - best[1] < 1e-4, f"{chosen[index]} differs at token {first}: {given} instead of {text}"


def run(config: ShardConfig, prompts: list[list[int]], digests: list[str]) -> list[list[int]]:
    """All requests at once through the engine; their tokens."""
    inbox, outbox = Inbox(), Outbox()
    engine = build_engine(config, load_model(config), inbox, outbox)
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    requests = [
        Request((1, index), list(prompt), len(prompt), NEW_TOKENS, adapter_digest=digest)
        for index, (prompt, digest) in enumerate(zip(prompts, digests, strict=True))
    ]
    inbox.put(Commands(1, submits=list(requests)))
    texts: dict[int, list[int]] = {}
    ended = 0
    while ended < len(prompts):
        engine.step()
        if not engine.scheduler.running:
            inbox.wait(0.05)
        for output in outbox.take(1).outputs:
            assert not output.error, output.error
            texts.setdefault(output.key[1], []).extend(output.token_ids)
            ended += bool(output.finish_reason)
    engine.scheduler.check()
    return [texts[index] for index in range(len(prompts))]


def test_a_request_fails_alone_when_its_adapter_cannot_be_read(tmp_path: Path) -> None:
    folder, store = tiny.make("llama", tmp_path / "model"), tmp_path / "store"
    store.mkdir()
    (store / ("b" * 64 + ".safetensors")).write_bytes(b"nonsense")
    config = ShardConfig("llama", str(folder), "unix:/dev/null", dtype="float32", adapter_store=str(store))
    config = replace(config, max_total_tokens=128, max_active_adapters=4)
    inbox, outbox = Inbox(), Outbox()
    engine = build_engine(config, load_model(config), inbox, outbox)
    outbox.open(1, wake=lambda: None)
    inbox.put(StreamOpened(1))
    digests = ["", "a" * 64, "b" * 64]
    inbox.put(Commands(1, submits=[Request((1, i), [1, 2, 3], 3, 4, adapter_digest=d) for i, d in enumerate(digests)]))
    errors: dict[int, str] = {}
    while len(errors) < 3:
        engine.step()
        if not engine.scheduler.running:
            inbox.wait(0.05)
        errors |= {output.key[1]: output.error for output in outbox.take(1).outputs if output.finish_reason}
    assert errors[0] == "" and "cannot be read" in errors[1] and "cannot be read" in errors[2]
    engine.scheduler.check()

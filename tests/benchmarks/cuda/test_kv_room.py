"""Tokens of KV per card: at least 0.95 of what vLLM's rule gives, and the table that the documentation shows."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.cuda import kv_room
from benchmarks.cuda.kv_room import CARDS, LLAMA_3B, Card, Room, rooms
from benchmarks.cuda.setup import LLAMA_8B, LlamaShape
from lorikeet.shard.model.kv_memory import default_slot_bytes

DOCUMENT = Path(__file__).parents[3] / "docs" / "cuda.md"


@pytest.mark.parametrize("found", rooms(), ids=lambda each: f"{each.card.name}, adapters: {each.has_adapters}")
def test_a_card_holds_about_as_many_tokens_as_in_vllm(found: Room) -> None:
    assert found.ours >= 0.95 * found.vllm


def test_the_table_is_that_of_the_documentation() -> None:
    assert "\n".join(kv_room.table()) in DOCUMENT.read_text()


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_3B])
def test_weights_are_those_of_the_model(shape: LlamaShape) -> None:
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(LlamaConfig(**shape.config(), head_dim=128), dtype=torch.bfloat16)
    found = sum(2 * parameter.numel() for parameter in network.parameters())
    assert found == pytest.approx(kv_room.weight_bytes(shape), rel=1e-3)


def test_slots_for_adapters_take_no_more_than_usual_adapters_need() -> None:
    card: Card = CARDS[1]
    rank = kv_room.rank_bytes(card.shape)
    left = card.total - kv_room.weight_bytes(card.shape)
    assert default_slot_bytes(card.total, left, rank) == 128 * rank < 0.03 * card.total
    assert default_slot_bytes(150 << 30, 134 << 30, rank) == int(0.04 * (134 << 30))
    assert default_slot_bytes(1 << 30, 1 << 29, rank) == (1 << 30) // 10

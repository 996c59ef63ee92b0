"""How many tokens of KV fit into a card by a shard's own code, and by vLLM's rule. Needs no device.

    python -m benchmarks.cuda.kv_room

What only a device can tell is declared here: what CUDA takes, activations of the largest step, and graphs.
The stage `start` of `make gpu-check` measures them. The table is part of docs/cuda.md, and a test compares both.
"""

from dataclasses import dataclass

from benchmarks.cuda.setup import LLAMA_3B, LLAMA_8B, LlamaShape
from benchmarks.evidence import arguments
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model.kv_memory import default_slot_bytes, room

GIB = 1 << 30
ITEM = 2
"""Bytes of a bfloat16 or float16 number."""
CONTEXT = 500_000_000
"""Bytes of a CUDA context and of libraries."""
STEP_TOKENS, SAMPLED = 4096, 256
"""Tokens and sampled rows of the largest step."""
GRAPHS = {False: 250_000_000, True: 600_000_000}
"""Bytes of all graphs, without and with adapters."""
UTILIZATION = 0.9
"""vLLM's default `gpu_memory_utilization`."""
SAME_RANKS = 128
"""Ranks that vLLM's buffers for adapters hold: eight adapters of rank 16, as the slots here do at least."""


@dataclass(frozen=True)
class Card:
    """A card and the model that it serves."""

    name: str
    total: int
    """Bytes that the driver reports."""
    model: str
    shape: LlamaShape


CARDS = (
    Card("T4", 15_655_829_504, "Llama 3.2 3B, float16", LLAMA_3B),
    Card("RTX 4090", 25_393_692_672, "Llama 3.1 8B", LLAMA_8B),
    Card("L40S", 47_810_936_832, "Llama 3.1 8B", LLAMA_8B),
    Card("A100 40 GB", 42_297_786_368, "Llama 3.1 8B", LLAMA_8B),
    Card("A100 80 GB", 84_974_239_744, "Llama 3.1 8B", LLAMA_8B),
    Card("H100", 84_929_347_584, "Llama 3.1 8B", LLAMA_8B),
    Card("H200", 150_110_011_392, "Llama 3.1 8B", LLAMA_8B),
)


@dataclass(frozen=True)
class Room:
    """Tokens of KV on a card."""

    card: Card
    has_adapters: bool
    ours: int
    vllm: int

    @property
    def ratio(self) -> float:
        return self.ours / self.vllm


def weight_bytes(shape: LlamaShape) -> int:
    """Bytes of the weights, without norms."""
    embedding = 0 if shape.is_tied else shape.vocabulary * shape.hidden
    return ITEM * (shape.num_multiplied + embedding)


def rank_bytes(shape: LlamaShape) -> int:
    """Bytes of one rank of an adapter of all linear layers."""
    return ITEM * shape.layers * sum(map(sum, shape.linears))


def step_bytes(shape: LlamaShape) -> int:
    """Bytes of activations of the largest step: gate, up and their product, rows of hidden numbers, and logits with
    what the sampler makes of them.
    """
    rows = STEP_TOKENS * ITEM * (3 * shape.mlp + 6 * shape.hidden)
    return rows + 6 * SAMPLED * shape.vocabulary * 4


def ours(card: Card, has_adapters: bool) -> int:
    """Tokens by the code of a shard with default flags."""
    config = ShardConfig(card.model, "", "")
    weights = weight_bytes(card.shape)
    left = room(config, card.total, used=weights + CONTEXT, step=step_bytes(card.shape)) - GRAPHS[has_adapters]
    if has_adapters:
        free_of_weights = card.total * config.cuda_memory_fraction - weights
        left -= default_slot_bytes(card.total, free_of_weights, rank_bytes(card.shape))
    return left // card.shape.kv_bytes_per_token


def vllm(card: Card, has_adapters: bool) -> int:
    """Tokens by vLLM's rule: a share of the device, minus weights, the peak of a profiled step, and what is not torch's
    (vllm/v1/worker/gpu_worker.py, determine_available_memory). Adapters are part of the weights: buffers for
    `max_loras` adapters of `max_lora_rank`. Graphs are not subtracted.
    """
    left = card.total * UTILIZATION - weight_bytes(card.shape) - CONTEXT - step_bytes(card.shape)
    if has_adapters:
        left -= SAME_RANKS * rank_bytes(card.shape)
    return int(left) // card.shape.kv_bytes_per_token


def rooms() -> list[Room]:
    return [Room(card, has, ours(card, has), vllm(card, has)) for card in CARDS for has in (False, True)]


def table() -> list[str]:
    """The lines of the table in docs/cuda.md."""
    lines = ["| card | model | adapters | tokens | vLLM's rule | ratio |", "|---|---|---|---|---|---|"]
    for each in rooms():
        adapters = "yes" if each.has_adapters else "no"
        counts = f"{each.ours:,} | {each.vllm:,} | {each.ratio:.2f}".replace(",", " ")
        lines.append(f"| {each.card.name} | {each.card.model} | {adapters} | {counts} |")
    return lines


if __name__ == "__main__":
    arguments.parser(__doc__).parse_args()
    print("\n".join(table()))

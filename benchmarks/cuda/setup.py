"""What is measured: shapes of models, loads and rounds, at full size and as small as a test wants it; and the shapes
that kernels are measured with.
"""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models.limit import Shape


@dataclass(frozen=True)
class LlamaShape(Shape):
    """The sizes of a Llama."""

    is_tied: bool = False
    """Whether the output head is the embedding."""

    def config(self) -> dict[str, Any]:
        """What transformers' LlamaConfig is made of."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 131_072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": self.is_tied,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }


LLAMA_8B = LlamaShape(4096, 14336, 32, 32, 8, 128_256)
"""Llama 3.1 8B."""
LLAMA_3B = LlamaShape(3072, 8192, 28, 24, 8, 128_256, is_tied=True)
"""Llama 3.2 3B."""
LLAMA_1B = LlamaShape(2048, 8192, 16, 32, 8, 128_256, is_tied=True)
"""Llama 3.2 1B."""
LLAMA_100M = LlamaShape(768, 2048, 4, 12, 4, 128_256, is_tied=True)
"""A draft model of about a tenth of that."""
TINY = LlamaShape(64, 128, 2, 4, 2, 512)
TINIER = LlamaShape(64, 128, 1, 4, 2, 512)


@dataclass(frozen=True)
class Setup:
    """How much is measured, of what and where. The defaults are full size."""

    device: str = "cuda:0"
    dtype: str = "bfloat16"
    large: LlamaShape = LLAMA_8B
    small: LlamaShape = LLAMA_1B
    draft: LlamaShape = LLAMA_100M
    seed: int = 20_261_123
    repeats: int = 10
    """Repetitions of one timed call."""
    requests: int = 64
    """At once, in a full batch."""
    prompt: int = 128
    text: int = 192
    """Tokens of each request's output."""
    longest: int = 4096
    """Tokens that one request may have."""
    bytes_copied: int = 4 << 30
    swaps: int = 16
    """In a round."""
    swap_batch: int = 8
    """Requests that run meanwhile."""
    contexts: tuple[int, ...] = (1024, 8192, 32_768)
    queries: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    """Query lengths of prompts by which the kernel of attention is chosen."""
    loads: tuple[int, ...] = (1, 8, 32)
    """Requests at once under which speculation is measured."""
    width: int = 4
    """Drafts of a request in a step."""
    rank: int = 16
    """Rank of all adapters."""
    starts: int = 2
    """Starts of a shard."""
    is_smoke: bool = False
    """On CPU, where times mean nothing: what a smoke run leaves out for its length is left out."""

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")


SMOKE = Setup(
    "cpu", "float32", TINY, TINIER, TINIER, repeats=2, requests=4, prompt=6,
    text=8, longest=64, bytes_copied=1 << 20, swaps=2, swap_batch=2, contexts=(24,),
    queries=(4, 8), loads=(1, 2), width=2, rank=2, starts=1,
    is_smoke=True,
)  # fmt: skip


GIB = 1 << 30
SMALL_BYTES, MEDIUM_BYTES = 20 * GIB, 44 * GIB
"""Memory of cards below which a smaller model, and fewer requests, are measured: T4; A10, RTX 4090, A100 40 GB."""


def fitted(setup: Setup, num_bytes: int, capability: tuple[int, int]) -> Setup:
    """The setup for a card with so much memory. Below compute capability 8.0 there is no bfloat16."""
    setup = replace(setup, dtype="bfloat16" if capability >= (8, 0) else "float16")
    if num_bytes < SMALL_BYTES:
        return replace(setup, large=LLAMA_3B, requests=32, contexts=(1024, 8192))
    if num_bytes < MEDIUM_BYTES:
        return replace(setup, requests=32, contexts=(1024, 8192))
    return setup


def at_hand() -> Setup:
    """Setup for the card at hand; at full size where there is none."""
    import torch

    if not torch.cuda.is_available():
        return Setup()
    return fitted(Setup(), torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_capability(0))


@dataclass(frozen=True)
class Step:
    """Requests with `tokens` new tokens each, that attend to `context` tokens in all."""

    requests: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        kind = "decode" if self.tokens == 1 else "prefill" if self.requests == 1 else "verification"
        return f"{kind} {self.requests} x {self.tokens} in {self.context}"


def limit_steps(setup: Setup) -> list[Step]:
    """Chunks of one prompt, of every query length up to every context length."""
    pairs = ((query, context) for context in setup.contexts for query in setup.queries if query <= context)
    return [Step(1, query, context) for query, context in pairs]


@dataclass(frozen=True)
class Speeds:
    """Speeds of the card at hand."""

    copy: float
    """Bytes per second that a copy within its memory moves, read and written ones counted."""
    read: float
    """Bytes per second of a sum over its memory."""
    flops: float
    """Operations per second of the best matrix product among the model's shapes."""
    upload: float
    """Bytes per second from page-locked host memory."""


def step_bytes(shape: LlamaShape, num_kv_tokens: float) -> float:
    """What a step reads at least: every matrix once, and K and V of so many tokens. Of the embedding it takes rows."""
    return 2 * shape.num_multiplied + num_kv_tokens * shape.kv_bytes_per_token

"""What a machine could do at most for a closed loop: the limit that a server's tokens per second are held against.

`benchmarks/serving/machine.py` measures the speeds.
"""

from dataclasses import dataclass

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama in bf16 with its own output head."""

    hidden: int = 1024
    mlp: int = 2816
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of every matrix product of one layer."""
        kv = self.kv_heads * self.head_dim
        attention = ((self.hidden, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, self.hidden))
        return (*attention, (self.mlp, self.hidden), (self.mlp, self.hidden), (self.hidden, self.mlp))

    @property
    def num_multiplied(self) -> int:
        """Parameters that every token is multiplied with: the layers' matrices and the head."""
        return self.layers * sum(rows * columns for rows, columns in self.linears) + self.vocabulary * self.hidden

    @property
    def weight_bytes(self) -> int:
        """All weights: matrices, head, embedding, norms."""
        norms = (2 * self.layers + 1) * self.hidden
        return 2 * (self.num_multiplied + self.vocabulary * self.hidden + norms)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in every layer."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_200M = Shape()


@dataclass(frozen=True)
class Machine:
    """Two measured speeds."""

    flops: float
    """Best bf16 matrix product over the model's shapes and 4096³, operations per second."""
    bytes_per_s: float
    """Best read of 1 GiB."""


def tokens_per_second(machine: Machine, clients: int, shape: Shape = LLAMA_200M) -> float:
    """64·C / (256·C·2P/G + 64·max((W + KV)/B, C·2P/G)), KV being that of C half-grown requests."""
    token_s = 2 * shape.num_multiplied / machine.flops
    half_grown = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    read_s = (shape.weight_bytes + clients * half_grown * shape.kv_bytes_per_token) / machine.bytes_per_s
    step_s = max(read_s, clients * token_s)
    return OUTPUT_TOKENS * clients / (PROMPT_TOKENS * clients * token_s + OUTPUT_TOKENS * step_s)

"""What a shard and its trainer of Medusa heads agree on: rows in memory that both map, and the messages between
them.

A row is one output token: the hidden state at the output head's input that gave it, the token, and the number of its
text. Rows of one text follow each other, with rows of others between them. Rows lie in blocks, each of one pair of
tenant and adapter. A block that is taken for other rows gets another version first, so that a reader that finds the
same version before and after it has read a block has read consistent rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_ROWS = 256
"""Rows of a block."""
MIN_BLOCKS = 8
"""Minimum number of blocks of all rings together."""


@dataclass(frozen=True)
class RowsLayout:
    """Where the arrays lie in the memory."""

    hidden_size: int
    num_blocks: int

    @classmethod
    def within(cls, max_bytes: int, hidden_size: int) -> "RowsLayout":
        """The layout of as many blocks as fit into `max_bytes`. Raises ValueError if those are too few."""
        block_bytes = cls(hidden_size, 1).num_bytes
        num_blocks = max_bytes // block_bytes
        if num_blocks < MIN_BLOCKS:
            raise ValueError(f"--learning-memory must be at least {MIN_BLOCKS * block_bytes} bytes for this model")
        return cls(hidden_size, num_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return self.num_blocks * (8 + BLOCK_ROWS * (2 * self.hidden_size + 12))

    def arrays(self, memory: memoryview) -> "RowArrays":
        """Views of `memory`, of `num_bytes` bytes."""
        num_rows, start = self.num_blocks * BLOCK_ROWS, 0
        arrays: list[npt.NDArray[Any]] = []
        shapes: list[tuple[type[np.generic], tuple[int, ...]]] = [
            (np.int64, (self.num_blocks,)),
            (np.int64, (num_rows,)),
            (np.int32, (num_rows,)),
            (np.uint16, (num_rows, self.hidden_size)),
        ]
        for kind, shape in shapes:
            array = np.ndarray(shape, kind, memory, start)
            arrays.append(array)
            start += array.nbytes
        return RowArrays(*arrays)


class RowArrays(NamedTuple):
    """Rows of all blocks, block after block."""

    # [blocks] version of each block
    versions: npt.NDArray[np.int64]
    # [rows] number of the text
    texts: npt.NDArray[np.int64]
    # [rows] token id
    token_ids: npt.NDArray[np.int32]
    # [rows, H] bits of bfloat16
    hidden: npt.NDArray[np.uint16]


class RowBlock(NamedTuple):
    """A block as it is when a job is sent."""

    number: int
    version: int
    num_rows: int


@dataclass(frozen=True)
class TrainerSettings:
    """The first message to a trainer."""

    model_path: str
    trust_remote_code: bool
    dtype: str
    """Dtype of the shard: `float32`, `bfloat16` or `float16`."""
    adapter_store: str
    store_bytes: int
    rows_fd: int
    """Descriptor of the memory with the rows."""
    layout: RowsLayout
    json_output: bool = False
    log_level: str = "info"


@dataclass(frozen=True)
class TrainingJob:
    """Train heads for one pair of tenant and adapter."""

    pair: int
    """Its number; training continues where the last job of the same pair ended."""
    blocks: tuple[RowBlock, ...]
    """Oldest first."""
    num_new: int
    """Rows that came since the last job of the pair."""
    adapter_digest: str
    heads_digest: str
    """The heads in use, "" for none."""
    min_gain: float
    """Heads with fewer tokens per step than this multiple of those in use are not stored."""


@dataclass(frozen=True)
class Trained:
    """The answer to a job."""

    pair: int
    heads_digest: str = ""
    """The new heads, in the adapter store; "" if they are not better."""
    tokens_per_step: float = 0.0
    """Tokens per step with the new heads, in a replay of the newest rows, which were not trained on."""
    tokens_per_step_before: float = 0.0
    """Tokens per step with the heads in use, in the same replay."""
    num_rows: int = 0
    """Rows that were trained on."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    error: str = ""
    """Why there are none."""


def row_indices(blocks: Sequence[RowBlock]) -> npt.NDArray[np.int64]:
    """[rows] indices of the rows of these blocks, oldest first."""
    parts = [np.arange(block.num_rows) + block.number * BLOCK_ROWS for block in blocks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)

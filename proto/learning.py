"""What a shard and its trainer of Medusa heads agree on: rows in memory that both map, and the messages between
them.

A row is one output token: the hidden state at the output head's input that gave it, the token, and the number of its
text. Rows of one text follow each other, with rows of others between them. Rows lie in blocks, each of one pair of
tenant and adapter. A block that is taken for other rows gets another version first, so that a reader that finds the
same version before and after it has read a block has read consistent rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lorikeet.proto import shard_pb2 as pb

Pair = tuple[str, str]
"""The tenant, and the digest of the adapter: "" for the base model."""
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
        if max_bytes < MIN_BLOCKS * block_bytes:
            raise ValueError(f"--learning-memory must be at least {MIN_BLOCKS * block_bytes} bytes for this model")
        return cls(hidden_size, max_bytes // block_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return self.num_blocks * (8 + BLOCK_ROWS * self._row.itemsize)

    @property
    def _row(self) -> np.dtype[np.void]:
        """`hidden` has the bits of bfloat16."""
        return np.dtype([("text", "i8"), ("token_id", "i4"), ("hidden", "u2", (self.hidden_size,))])

    def arrays(self, memory: memoryview) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]:
        """Views of `memory`: [blocks] version of each block; [rows] with fields `text`, `token_id` and `hidden`."""
        versions = np.ndarray(self.num_blocks, np.int64, memory)
        return versions, np.ndarray(self.num_blocks * BLOCK_ROWS, self._row, memory, versions.nbytes)


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


class TrainingJob(NamedTuple):
    """Train heads for one pair. Training continues where the last job of the same pair ended."""

    pair: Pair
    blocks: tuple[RowBlock, ...]
    """Oldest first."""
    num_new: int
    """Rows that came since the last job of the pair."""
    heads_digest: str
    """The heads in use, "" for none."""
    min_gain: float
    """Heads with fewer tokens per step than this multiple of those in use are rejected, and not stored."""


class Trained(NamedTuple):
    """The answer to a job."""

    pair: Pair
    decision: pb.LearningDecision
    """`adopted` with heads that are in the adapter store, `rejected` or `failed`, with the reason."""
    cpu_seconds: float


def row_indices(blocks: Sequence[RowBlock]) -> npt.NDArray[np.int64]:
    """[rows] indices of the rows of these blocks, oldest first."""
    parts = [np.arange(block.num_rows) + block.number * BLOCK_ROWS for block in blocks]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)

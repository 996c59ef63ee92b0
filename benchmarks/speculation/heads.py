"""The cost of Medusa heads: steps of the random 200 M Llama with drafts of three heads against the same steps without.

One row with one set of heads, and four rows of four requests with four sets, in turn in one process. Only the model
runs: no scheduling, sampling or network.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.evidence.figure import Cases, Raw, in_rounds
from benchmarks.load import peers
from lorikeet.shard.batch.inputs import HeadsRow
from lorikeet.shard.batch.segments import Segment
from lorikeet.shard.config import ShardConfig
from lorikeet.shard.model import load_model
from lorikeet.shard.model.kernels.packing import can_pack, pack
from lorikeet.shard.model.medusa.heads import HeadsShape, bind

ROUNDS = 8
TURNS = 40
"""Steps of each kind in a round."""
NUM_HEADS = 3
NUM_SETS = 4
KV_LEN = 256
SEED = 20261122


@dataclass(frozen=True)
class HeadsSize:
    """How much is measured, of which model."""

    rounds: int = ROUNDS
    turns: int = TURNS
    folder: Path | None = None
    """None is the 200 M Llama."""
    dtype: str | None = None


def measure(size: HeadsSize | None = None) -> Cases:
    """One case per round, with the median seconds of each kind of step."""
    size = size or HeadsSize()
    model = loaded(size)
    with torch.inference_mode():
        yield from in_rounds(size.rounds, lambda _: _round(model, size.turns))


def loaded(size: HeadsSize) -> Any:
    """The model with NUM_SETS sets of random heads in its first slots."""
    folder = size.folder or peers.model_folder()
    model = load_model(ShardConfig("random", str(folder), "unix:/dev/null", dtype=size.dtype))
    pages = -(-(KV_LEN + 1) // model.page_size)
    model.allocate_kv(NUM_SETS * pages)
    model.allocate_adapters(NUM_SETS)
    torch.manual_seed(SEED)
    shape, dtype = HeadsShape(NUM_HEADS, 1, model.heads.hidden_size, 0), model.info.dtype
    for slot in range(NUM_SETS):
        tensors = [(torch.randn(size_of_tensor) * 0.02).to(dtype) for size_of_tensor in shape.tensors()]
        model.heads.put(slot, bind(shape, tensors, pack if can_pack(dtype) else _plain))
    return model


def _plain(weight: Any, bias: Any) -> Any:
    return lambda x: linear(x, weight, bias)


def _round(model: Any, turns: int) -> dict[str, float]:
    """Medians over turns, the kinds one after the other in each."""
    kinds = {"one": (1, False), "one with heads": (1, True), "four": (NUM_SETS, False), "four with heads": (4, True)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, (num_rows, has_heads) in kinds.items():
            start = time.perf_counter()
            _step(model, num_rows, range(num_rows) if has_heads else ())
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def _step(model: Any, num_rows: int, slots: Sequence[int]) -> None:
    """One token of each of `num_rows` requests; the heads in slot i draft from row i."""
    pages = -(-(KV_LEN + 1) // model.page_size)
    segments = [Segment(KV_LEN, 1, range(i * pages, (i + 1) * pages)) for i in range(num_rows)]
    rows = list(range(num_rows))
    heads = [HeadsRow(row, slot, NUM_HEADS) for row, slot in zip(rows, slots, strict=False)]
    ids = torch.full((num_rows,), 300)
    model.inputs.fill(segments, ids, torch.tensor(rows), rows, heads)
    logits = model.forward()
    if heads:
        logits[num_rows:].argmax(-1)


def over_plain(name: str, raw: Raw) -> float:
    """Seconds of a step with heads over one without."""
    return float(raw[f"{name} with heads"] / raw[name])

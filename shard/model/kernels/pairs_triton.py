"""Splits sorted pairs of token and expert into tasks by one Triton kernel: `tasks_of` of pairs.py needs many small
launches, each of which costs more than its work.

The order of tasks is arbitrary; no task reads what another writes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (Triton compiles the kernels' text, annotations too)

import torch
import triton
import triton.language as tl

from lorikeet.shard.batch.row_groups import most_tasks
from lorikeet.shard.model.kernels.pairs import PairTasks, SortedPairs
from lorikeet.shard.system.operators import operator

BLOCK = 128
"""Pairs of one program."""


@triton.jit(do_not_specialize=["num_pairs", "num_halvings"])
def split_pairs(
    keys, tasks, pair_ids, num_tasks, num_pairs, num_halvings, stride, num_targets,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BY_EXPERT: tl.constexpr,
):  # fmt: skip
    """keys: [pairs] of SortedPairs; tasks: [pairs at most, 3] zeros; pair_ids: [pairs]; num_tasks: one number, 0."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = places < num_pairs
    # a key divided by this has no adapter
    part = stride if BY_EXPERT else 1
    key = tl.load(keys + places, mask=is_pair, other=0) // part
    # the first pair with this key
    low, high = tl.zeros_like(places), places
    for _ in range(num_halvings):
        middle = (low + high) // 2
        is_before = tl.load(keys + middle, mask=is_pair, other=0) // part < key
        low, high = tl.where(is_before, middle + 1, low), tl.where(is_before, high, middle)
    if BY_EXPERT:
        value = key
    else:
        value = tl.where(key % stride > 0, (key % stride - 1) * num_targets + key // stride, -1)
    starts_task = (is_pair & (value >= 0) & ((places - low) % ROWS == 0)).to(tl.int32)
    count = tl.zeros_like(places)
    for offset in range(ROWS):
        neighbour = places + offset
        is_inside = neighbour < num_pairs
        count += (is_inside & (tl.load(keys + neighbour, mask=is_inside, other=0) // part == key)).to(tl.int32)
    number = tl.atomic_add(num_tasks, tl.sum(starts_task)) + tl.cumsum(starts_task) - 1
    task = tasks + number * 3
    tl.store(task, value, mask=starts_task > 0)
    tl.store(task + 1, places, mask=starts_task > 0)
    tl.store(task + 2, count, mask=starts_task > 0)
    tl.store(pair_ids + places, places, mask=is_pair)


def partition_pairs(pairs: SortedPairs, num_rows: int, num_targets: int | None = None) -> PairTasks:
    """Tasks of up to `num_rows` pairs of one expert and one adapter, value `slot * num_targets + expert`; without
    `num_targets` of one expert, value the expert.
    """
    num_keys = pairs.num_experts * (1 if num_targets is None else pairs.num_slots)
    return PairTasks(
        *split_keys(
            pairs.keys, pairs.num_slots + 1, num_targets or 0, num_rows, most_tasks(len(pairs.keys), num_keys, num_rows)
        )
    )


@operator("split_keys", mutates_args=())
def split_keys(
    keys: torch.Tensor, stride: int, num_targets: int, num_rows: int, num_tasks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """keys: [P] int32 ascending. Returns the tasks, [num_tasks, 3] int32, and [P] int32 0 … P - 1."""
    num_pairs = keys.shape[0]
    made = torch.zeros(3 * num_tasks + 1, dtype=torch.int32, device=keys.device)
    pair_ids = torch.empty_like(keys)
    split_pairs[(triton.cdiv(num_pairs, BLOCK),)](
        keys, made, pair_ids, made[3 * num_tasks :], num_pairs, num_pairs.bit_length(), stride, num_targets,
        ROWS=num_rows, BLOCK=BLOCK, BY_EXPERT=not num_targets,
    )  # fmt: skip
    return made[: 3 * num_tasks].view(-1, 3), pair_ids


@split_keys.register_fake
def _(
    keys: torch.Tensor, _stride: int, _num_targets: int, _num_rows: int, num_tasks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.new_empty(num_tasks, 3), torch.empty_like(keys)

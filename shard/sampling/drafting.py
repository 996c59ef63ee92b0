"""The drafts of a draft model in one step: one token of some rows at a time, sampled as the target would there.

Each request's transforms apply, with each draft counted as if emitted. The noise is the target's, so that a draft is
mostly the target's token where the two distributions are alike; under the rejection rule it is separate noise, and the
distributions are kept. Reads nothing from the device before `to_host`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lorikeet.proto.params import LogprobParams
from lorikeet.shard.batch.transfer import HostCopy
from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.noise import Purpose
from lorikeet.shard.sampling.plan import Block, Chunk, RowState
from lorikeet.shard.sampling.rejection import DraftDistributions

MOST_PLANS = 64


@dataclass(frozen=True)
class DraftPlan:
    """How one batch of rows is sampled; rows in neither list of chunks are the arg max."""

    shared_noise: list[Chunk]
    rejecting: list[Chunk]
    # [n] rows of the batch whose distributions depend on history, [n] their device rows
    depending_on_history: tuple[torch.Tensor, torch.Tensor] | None
    # [n] rows of the batch with penalties, [n] their rows of the token counts
    counted: tuple[torch.Tensor, torch.Tensor] | None
    # [n] rows of the batch that read the history, [n] their device rows
    recorded: tuple[torch.Tensor, torch.Tensor] | None


class DraftDraws:
    """All drafts that a draft model samples in one step."""

    def __init__(self, state: RowState, plans: dict[tuple[int, ...], DraftPlan]) -> None:
        """`plans` outlive the step; they hold until a row changes."""
        self._state = state
        self._plans = plans
        self._drawn: list[tuple[list[int], torch.Tensor]] = []  # by depth: rows, and [n] their tokens
        self._assumed: list[tuple[torch.Tensor, torch.Tensor]] = []  # [n] rows of the counts, [n] tokens
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # [n] device rows, [n] their newest tokens
        self._distributions: list[torch.Tensor] = []  # [n, V] each
        self._distribution_at: dict[tuple[int, int], int] = {}  # by row and depth: row of all distributions

    def draw(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """logits: [n, V] float32, one per entry of `rows`, whose next token is at `positions`. Returns [n] tokens."""
        state, depth, plan = self._state, len(self._drawn), self._plan_for(tuple(rows))
        token_ids = arg_max(logits)
        at = state.planner.tensor(positions) if plan.shared_noise or plan.rejecting else None
        for chunk in plan.shared_noise:
            scores = state.distribution(chunk, logits[chunk.batch_rows], at)
            token_ids.index_copy_(0, chunk.batch_rows, state.choose(chunk, scores, at))
        for chunk in plan.rejecting:
            scores = state.distribution(chunk, logits[chunk.batch_rows], at)
            token_ids.index_copy_(0, chunk.batch_rows, state.choose(chunk, scores, at, Purpose.DRAFT))
            first = sum(map(len, self._distributions))
            self._distributions.append(torch.softmax(scores, dim=-1))
            self._distribution_at |= {(rows[index], depth): first + n for n, index in enumerate(chunk.members)}
        self._drawn.append((list(rows), token_ids))
        self._assume_accepted(plan, token_ids)
        if plan.recorded is not None and at is not None:
            recorded, device_rows = plan.recorded
            drafted = token_ids.index_select(0, recorded)
            state.history.write(device_rows, at.index_select(0, recorded), drafted)
        return token_ids

    def restore(self) -> None:
        """Restore the rows' state from before the first draft."""
        for slots, token_ids in self._assumed:
            self._state.counts.add(slots, token_ids, -torch.ones_like(token_ids, dtype=torch.int32))
        for rows, token_ids in reversed(self._before):
            self._state.last_tokens.index_copy_(0, rows, token_ids)
        self._assumed, self._before = [], []

    def to_host(self) -> dict[int, list[int]]:
        """The drafts of each row. Waits for the device."""
        found: dict[int, list[int]] = {}
        if not self._drawn:
            return found
        (token_ids,) = HostCopy(torch.cat([token_ids for _, token_ids in self._drawn])).wait()
        owners = [row for rows, _ in self._drawn for row in rows]
        for row, token_id in zip(owners, token_ids.tolist(), strict=True):
            found.setdefault(row, []).append(token_id)
        return found

    def distributions(self, block: Block) -> DraftDistributions | None:
        """Input of the rejection rule at the positions of a block; None where it is used for no row."""
        if not self._distributions:
            return None
        at, drafted = [0] * block.num_tokens, [0] * block.num_tokens
        for row, ids, first in zip(block.rows, block.drafts, block.firsts, strict=True):
            for depth, token_id in enumerate(ids):
                at[first + depth] = self._distribution_at.get((row.row, depth), -1) + 1
                drafted[first + depth] = token_id
        table = torch.cat([torch.zeros_like(self._distributions[0][:1]), *self._distributions])
        of, tensor = {row for row, _ in self._distribution_at}, self._state.planner.tensor
        return DraftDistributions(of, table, tensor(at), tensor(drafted))

    def _plan_for(self, rows: tuple[int, ...]) -> DraftPlan:
        """How to sample for these rows: made once for as long as they are the same."""
        if rows not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[rows] = self._make_plan(rows)
        return self._plans[rows]

    def _make_plan(self, rows: Sequence[int]) -> DraftPlan:
        planner = self._state.planner
        members = [(at, replace(self._state.rows[row], logprobs=LogprobParams())) for at, row in enumerate(rows)]
        depending = [(at, row) for at, row in members if row.depends_on_history]
        return DraftPlan(
            shared_noise=planner.plan_some(
                [member for member in members if not member[1].rejects], may_fuse=False
            ).chunks,
            rejecting=planner.plan_some([member for member in members if member[1].rejects], may_fuse=False).chunks,
            depending_on_history=planner.pair([(at, row.row) for at, row in depending]),
            counted=planner.pair([(at, row.slot) for at, row in depending if row.slot >= 0]),
            recorded=planner.pair([(at, row.row) for at, row in depending if row.reads_history]),
        )

    def _assume_accepted(self, plan: DraftPlan, token_ids: torch.Tensor) -> None:
        """token_ids: [n]. Continue as if these had been emitted, where distributions depend on history."""
        if plan.depending_on_history is not None:
            at, rows = plan.depending_on_history
            self._before.append((rows, self._state.last_tokens.index_select(0, rows)))
            self._state.last_tokens.index_copy_(0, rows, token_ids.index_select(0, at))
        if plan.counted is not None:
            at, slots = plan.counted
            drafted = token_ids.index_select(0, at)
            self._state.counts.append(slots, drafted)
            self._assumed.append((slots, drafted))

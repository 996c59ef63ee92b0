"""The draws of a draft model in one step: one token of some rows at a time, as the target's would be drawn there.

A row's own transforms hold, each draft counted as if emitted. Its noise is the target's, so that a draft is mostly the
target's token where the two laws are alike; or, where the rejection rule decides, its own, and the laws are kept.
Nothing is read from the device before `to_host`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lorikeet.shard.batch.transfer import HostCopy
from lorikeet.shard.sampling.block import Block
from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.noise import Purpose, log_exponentials, row_keys
from lorikeet.shard.sampling.penalties import TokenCounts
from lorikeet.shard.sampling.plan import Chunk, Planner, Row
from lorikeet.shard.sampling.rejection import DraftDistributions
from lorikeet.shard.scheduler.request import LogprobParams

MOST_PLANS = 64
DistributionOf = Callable[[Chunk, torch.Tensor], torch.Tensor]
"""From a chunk and its logits, which it may change, to the scores that tokens are chosen by."""


@dataclass(frozen=True)
class DraftPlan:
    """How one batch of rows is drawn; rows in neither list of chunks are the arg max."""

    coupled: list[Chunk]
    rejecting: list[Chunk]
    # [n] rows of the batch whose laws look back, [n] their device rows
    looking: tuple[torch.Tensor, torch.Tensor] | None
    # [n] rows of the batch with penalties, [n] their rows of the token counts
    counted: tuple[torch.Tensor, torch.Tensor] | None


class DraftDraws:
    """All drafts that a draft model draws in one step."""

    def __init__(
        self,
        rows: Mapping[int, Row],
        planner: Planner,
        counts: TokenCounts,
        last_tokens: torch.Tensor,
        words: torch.Tensor,
        distribution_of: DistributionOf,
        plans: dict[tuple[int, ...], DraftPlan],
    ) -> None:
        """`plans` outlive the step; they hold until a row changes."""
        self._rows = rows
        self._planner = planner
        self._counts = counts
        self._last_tokens = last_tokens
        self._words = words
        self._distribution_of = distribution_of
        self._plans = plans
        self._drawn: list[tuple[list[int], torch.Tensor]] = []  # by depth: rows, and [n] their tokens
        self._assumed: list[tuple[torch.Tensor, torch.Tensor]] = []  # [n] rows of the counts, [n] tokens
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []  # [n] device rows, [n] their newest tokens
        self._distributions: list[torch.Tensor] = []  # [n, V] each
        self._distribution_at: dict[tuple[int, int], int] = {}  # by row and depth: row of all laws together

    def draw(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """logits: [n, V] float32, one per entry of `rows`, whose next token is at `positions`. Returns [n] tokens."""
        depth, plan = len(self._drawn), self._plan_for(rows)
        token_ids = arg_max(logits)
        if plan.coupled or plan.rejecting:
            places = self._planner.tensor(positions)
            for chunk in plan.coupled:
                self._choose(
                    chunk, self._distribution_of(chunk, logits[chunk.batch_rows]), places, Purpose.DRAW, token_ids
                )
            for chunk in plan.rejecting:
                scores = self._distribution_of(chunk, logits[chunk.batch_rows])
                self._choose(chunk, scores, places, Purpose.DRAFT, token_ids)
                self._keep(chunk, scores, rows, depth)
        self._drawn.append((list(rows), token_ids))
        self._assume_accepted(plan, token_ids)
        return token_ids

    def forget(self) -> None:
        """Take the rows' state back to what it was before any draft."""
        for slots, token_ids in self._assumed:
            self._counts.add(slots, token_ids, -torch.ones_like(token_ids, dtype=torch.int32))
        for rows, token_ids in reversed(self._before):
            self._last_tokens.index_copy_(0, rows, token_ids)
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
        """What the rejection rule needs at the positions of a block; None where it holds for no row."""
        if not self._distributions:
            return None
        at, drafted = [0] * block.num_tokens, [0] * block.num_tokens
        for row, ids, first in zip(block.rows, block.drafts, block.firsts, strict=True):
            for depth, token_id in enumerate(ids):
                at[first + depth] = self._distribution_at.get((row.row, depth), -1) + 1
                drafted[first + depth] = token_id
        table = torch.cat([torch.zeros_like(self._distributions[0][:1]), *self._distributions])
        of = {row for row, _ in self._distribution_at}
        return DraftDistributions(of, table, self._planner.tensor(at), self._planner.tensor(drafted))

    def _choose(
        self, chunk: Chunk, scores: torch.Tensor, places: torch.Tensor, purpose: Purpose, token_ids: torch.Tensor
    ) -> None:
        """scores: [S', V]; places: [n]; token_ids: [n], changed in place."""
        if chunk.drawn:
            keys = row_keys(chunk.seeds, places.index_select(0, chunk.batch_rows), purpose)
            scores = scores - log_exponentials(self._words, keys)
        token_ids.index_copy_(0, chunk.batch_rows, arg_max(scores))

    def _keep(self, chunk: Chunk, scores: torch.Tensor, rows: Sequence[int], depth: int) -> None:
        """scores: [S', V]. Keep the laws that a chunk's drafts were drawn from."""
        first = sum(len(distributions) for distributions in self._distributions)
        self._distributions.append(torch.softmax(scores, dim=-1))
        for at, index in enumerate(chunk.members):
            self._distribution_at[rows[index], depth] = first + at

    def _plan_for(self, rows: Sequence[int]) -> DraftPlan:
        """How to draw for these rows: made once for as long as they are the same."""
        key = tuple(rows)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(rows)
        return plan

    def _make_plan(self, rows: Sequence[int]) -> DraftPlan:
        members = [(at, replace(self._rows[row], logprobs=LogprobParams())) for at, row in enumerate(rows)]
        looking = [(at, row) for at, row in members if row.depends_on_history]
        counted = [(at, row.slot) for at, row in looking if row.slot >= 0]
        tensor, plan_some = self._planner.tensor, self._planner.plan_some
        return DraftPlan(
            coupled=plan_some([member for member in members if not member[1].rejects]).chunks,
            rejecting=plan_some([member for member in members if member[1].rejects]).chunks,
            looking=(tensor([at for at, _ in looking]), tensor([row.row for _, row in looking])) if looking else None,
            counted=(tensor([at for at, _ in counted]), tensor([slot for _, slot in counted])) if counted else None,
        )

    def _assume_accepted(self, plan: DraftPlan, token_ids: torch.Tensor) -> None:
        """token_ids: [n]. Go on as if these had been emitted, where laws look back."""
        if plan.looking is not None:
            at, rows = plan.looking
            self._before.append((rows, self._last_tokens.index_select(0, rows)))
            self._last_tokens.index_copy_(0, rows, token_ids.index_select(0, at))
        if plan.counted is not None:
            at, slots = plan.counted
            drafted = token_ids.index_select(0, at)
            self._counts.append(slots, drafted)
            self._assumed.append((slots, drafted))

"""The sampler: from the logits of a step to one token per request, every request by its own parameters.

Owns the device state that sampling needs: the newest token of each row and the counts behind penalties. Never reads
from the device while sampling, so a step may be sampled before the one before it is known to the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lorikeet.shard.sampling import filters
from lorikeet.shard.sampling.block import Block
from lorikeet.shard.sampling.drafting import DraftDraws, DraftPlan
from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.noise import Purpose, log_exponentials, row_keys, token_words
from lorikeet.shard.sampling.penalties import TokenCounts, Watermark
from lorikeet.shard.sampling.plan import Chunk, Filter, Plan, Planner, Row
from lorikeet.shard.sampling.rejection import DraftDistributions, settle
from lorikeet.shard.sampling.report import Outcome, Sampled
from lorikeet.shard.scheduler.request import LogprobParams, SamplingParams


class Sampler:
    """Samples one token for each of S rows at a time."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        watermark_gamma: float = 0.5,
        watermark_delta: float = 2.0,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        # [max_rows] newest token of each row, also when the host has not seen it yet
        self.last_tokens = torch.zeros(max_rows, dtype=torch.long, device=self._device)
        self._words = token_words(vocab_size, self._device)
        self._watermark = Watermark(self._words, watermark_gamma, watermark_delta)
        self._counts = TokenCounts(vocab_size, self._device)
        self._planner = Planner(vocab_size, self._device)
        self._rows: dict[int, Row] = {}
        self._plan: Plan | None = None
        self._draft_plans: dict[tuple[int, ...], DraftPlan] = {}
        self._planned: list[int] = []

    def add(
        self,
        row: int,
        params: SamplingParams,
        logprobs: LogprobParams,
        token_ids: list[int],
        num_prompt: int,
        rejects: bool = False,
    ) -> None:
        """Take a request into `row`; its first `num_prompt` known tokens are prompt, the others earlier output. With
        `rejects` the drafts of a draft model are verified by the rejection rule, where tokens are drawn at all.
        """
        if row in self._rows:
            raise ValueError(f"row {row} is taken")
        penalised = params.repetition_penalty != 1.0 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self._rows[row] = Row(
            row=row,
            params=replace(params, logit_bias=_summed(params.logit_bias)),
            logprobs=replace(
                logprobs,
                wanted=logprobs.wanted or logprobs.alternatives > 0,
                alternatives=min(logprobs.alternatives, self._vocab_size),
            ),
            slot=self._counts.take(token_ids, num_prompt) if penalised else -1,
            by_rejection=rejects,
        )
        self.last_tokens[row] = token_ids[-1]
        self._plan = None
        self._draft_plans.clear()

    def remove(self, row: int) -> None:
        """Let a row go."""
        slot = self._rows.pop(row).slot
        if slot >= 0:
            self._counts.give_back(slot)
        self._plan = None
        self._draft_plans.clear()

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int]) -> Sampled:
        """logits: [S, V] float32, not changed; one per entry of `rows`, whose next token is at `positions`."""
        plan = self._plan_for(list(rows))
        outcome = Outcome(len(rows), plan.num_alternatives, self._device)
        if plan.any_plain:
            outcome.token_ids = arg_max(logits)
            outcome.bad = _is_bad(logits, outcome.token_ids)
        places = self._planner.tensor(positions) if plan.any_drawn else None
        for chunk in plan.chunks:
            self._sample_chunk(chunk, logits, places, outcome)
        self.last_tokens.index_copy_(0, plan.rows, outcome.token_ids)
        if plan.counted is not None and plan.counted_slots is not None:
            self._counts.append(plan.counted_slots, outcome.token_ids.index_select(0, plan.counted))
        return outcome.sampled()

    def verify(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
        draws: DraftDraws | None = None,
    ) -> Sampled:
        """The target's own token at every position of every row, as if all drafts before it had been emitted.

        logits: [S, V], of each of `rows` one more than it has drafts; its first token is at `positions`. The row's
        state goes on behind the last token that is emitted: the first that is no draft, or the one after all drafts.
        `draws` are those of the draft model in this step; a draft of theirs may be verified by the rejection rule.
        """
        block = Block([self._rows[row] for row in rows], positions, drafts)
        outcome = Outcome(block.num_tokens, block.num_alternatives, self._device)
        if block.any_plain:
            outcome.token_ids = arg_max(logits)
            outcome.bad = _is_bad(logits, outcome.token_ids)
        places = self._planner.tensor(block.positions)
        distributions = None if draws is None else draws.distributions(block)
        for depth, members in enumerate(block.dependency_levels()):
            if depth:
                self._assume_accepted(block, depth)
            if distributions is not None:
                rejecting = [member for member in members if member[1].row in distributions.of]
                members = [member for member in members if member[1].row not in distributions.of]
                for chunk in self._planner.plan_some(rejecting).chunks:
                    self._sample_chunk(chunk, logits, places, outcome, distributions)
            for chunk in self._planner.plan_some(members).chunks:
                self._sample_chunk(chunk, logits, places, outcome)
        self._settle(block, outcome)
        return outcome.sampled()

    def begin_drafts(self) -> DraftDraws:
        """Begin to draw a step's drafts from a draft model: by each request's own transforms and noise."""
        return DraftDraws(
            self._rows,
            self._planner,
            self._counts,
            self.last_tokens,
            self._words,
            self._distribution,
            self._draft_plans,
        )

    def _assume_accepted(self, block: Block, depth: int) -> None:
        """Go on as if the draft before this depth had been emitted, where the law looks back."""
        members = [(row, ids[depth - 1]) for row, ids in block.depending_on_history if len(ids) >= depth]
        rows, token_ids = (
            self._planner.tensor(values) for values in zip(*[(r.row, t) for r, t in members], strict=True)
        )
        self.last_tokens.index_copy_(0, rows, token_ids)
        counted = [(row.slot, token_id) for row, token_id in members if row.slot >= 0]
        if counted:
            self._counts.append(*(self._planner.tensor(values) for values in zip(*counted, strict=True)))

    def _settle(self, block: Block, outcome: Outcome) -> None:
        """Move the rows' state behind the tokens that are emitted."""
        last = block.last_emitted(outcome.token_ids, outcome.bad, self._planner.tensor)
        token_ids = outcome.token_ids.index_select(0, last)
        self.last_tokens.index_copy_(0, self._planner.tensor([row.row for row in block.rows]), token_ids)
        counted = [index for index, row in enumerate(block.rows) if row.slot >= 0]
        if not counted:
            return
        slots = self._planner.tensor([block.rows[index].slot for index in counted])
        self._counts.append(slots, token_ids.index_select(0, self._planner.tensor(counted)))
        supposed = [
            (block.rows[index].slot, token_id, index, block.firsts[index] + depth)
            for index in counted
            for depth, token_id in enumerate(block.drafts[index])
        ]
        if supposed:
            slots, drafted, owners, places = (self._planner.tensor(values) for values in zip(*supposed, strict=True))
            was_emitted = places < last.index_select(0, owners)
            self._counts.add(slots, drafted, -(~was_emitted).to(torch.int32))

    def _plan_for(self, rows: list[int]) -> Plan:
        if self._plan is None or self._planned != rows:
            self._plan = self._planner.plan([self._rows[row] for row in rows])
            self._planned = rows
        return self._plan

    def _sample_chunk(
        self,
        chunk: Chunk,
        logits: torch.Tensor,
        positions: torch.Tensor | None,
        outcome: Outcome,
        distributions: DraftDistributions | None = None,
    ) -> None:
        """logits: [S, V]; positions: [S], wanted where tokens are drawn; laws: where the rejection rule holds."""
        scores = logits.index_select(0, chunk.batch_rows)
        if chunk.raw is not None and chunk.modifies_scores:
            logits = scores.clone()
        else:
            logits = scores
        scores = self._distribution(chunk, scores)
        if chunk.drawn and positions is not None:
            places = positions.index_select(0, chunk.batch_rows)
            if distributions is None:
                keys = row_keys(chunk.seeds, places, Purpose.DRAW)
                token_ids = arg_max(scores - log_exponentials(self._words, keys))
            else:
                draft_probs = distributions.table.index_select(0, distributions.at.index_select(0, chunk.batch_rows))
                drafted = distributions.drafted.index_select(0, chunk.batch_rows)
                token_ids = settle(scores, draft_probs, drafted, chunk.seeds, places, self._words)
        else:
            token_ids = arg_max(scores)
        outcome.token_ids.index_copy_(0, chunk.batch_rows, token_ids)
        outcome.bad.index_copy_(0, chunk.batch_rows, _is_bad(scores, token_ids))
        if chunk.processed is not None:
            outcome.report(chunk.processed, scores, token_ids)
        if chunk.raw is not None:
            outcome.report(chunk.raw, logits, token_ids)

    def _distribution(self, chunk: Chunk, scores: torch.Tensor) -> torch.Tensor:
        """scores: [S', V], perhaps changed in place. Returns [S', V]: those that tokens are chosen by."""
        if chunk.bias is not None:
            chunk.bias.apply(scores)
        if chunk.marked is not None and chunk.marked_rows is not None:
            self._watermark.apply(scores, chunk.marked, self.last_tokens.index_select(0, chunk.marked_rows))
        if chunk.penalties is not None:
            chunk.penalties.apply(scores, self._counts)
        return _filter(chunk, scores.div_(chunk.temperature)) if chunk.drawn else scores


def _summed(bias: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Each token once, with the sum of its entries."""
    totals: dict[int, float] = {}
    for token_id, value in bias:
        totals[token_id] = totals.get(token_id, 0.0) + value
    return tuple(totals.items())


def _is_bad(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; token_ids: [S], highest or drawn. Returns [S] bool: NaN, infinite, or nothing to draw."""
    return ~scores.gather(1, token_ids[:, None])[:, 0].isfinite()


def _filter(chunk: Chunk, scores: torch.Tensor) -> torch.Tensor:
    """scores: [S', V] after temperature, perhaps changed in place."""
    everywhere = chunk.top_k is not None and chunk.top_k.rows is None
    look = min(chunk.top_k.largest, filters.FIRST_CHECK) if chunk.top_k and everywhere else filters.FIRST_CHECK
    steps: list[tuple[Filter | None, Callable[[torch.Tensor, Filter], torch.Tensor]]] = [
        (chunk.top_k, lambda part, used: filters.top_k(part, used.values, used.largest)),
        (chunk.top_p, lambda part, used: filters.top_p(part, used.values, look)),
        (chunk.min_p, lambda part, used: filters.min_p(part, used.values)),
        (chunk.typical_p, lambda part, used: filters.typical_p(part, used.values, look)),
    ]
    for used, apply in steps:
        if used is not None:
            if used.rows is None:
                scores = apply(scores, used)
            else:
                scores.index_copy_(0, used.rows, apply(scores.index_select(0, used.rows), used))
    return scores

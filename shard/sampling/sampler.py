"""The sampler: from the logits of a step to one token per request, each request by its own parameters.

Owns the device state that sampling needs. Never reads from the device while sampling, so a step may be sampled before
the one before it is known to the host.

There are three kinds of rows (`Row` in plan.py), by how their tokens are chosen:

    fused      by the device's Triton kernels, all such rows in one launch; on CPU no row is fused
    plain      the arg max of unchanged logits, without log probabilities: one arg max over all rows of the step
    in chunks  all others: PyTorch operators over chunks of similar rows, all sampled or all greedy
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog
import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.batch.device_tokens import GraphSampling
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.sampling.drafting import DraftDraws, DraftPlan
from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.plan import Block, Chunk, Plan, Row, RowState, num_accepted
from lorikeet.shard.sampling.rejection import DraftDistributions, rejection_sample
from lorikeet.shard.sampling.report import Sampled, SlowRows
from lorikeet.shard.speculation.device.device_drafts import DeviceDrafts, StepDrafts

if TYPE_CHECKING:
    from lorikeet.shard.sampling.device import DeviceRows, Tile

log = structlog.get_logger()


class Sampler:
    """Samples one token for each of S rows at a time."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        watermark_gamma: float = 0.5,
        watermark_delta: float = 2.0,
        tile: "Tile | None" = None,
        has_kernels: bool = True,
        ngrams: tuple[int, int] = (1, 8),
    ) -> None:
        """`tile`: sample by Triton kernels of this size what they support; by default on CUDA, if there is triton and
        `has_kernels`. `ngrams`: tokens of the shortest and the longest match of prompt lookup on the device.
        """
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        kernels = _kernels() if has_kernels and (self._device.type == "cuda" or tile is not None) else None
        self._state = RowState(
            vocab_size, max_rows, self._device, watermark_gamma, watermark_delta, fuses=kernels is not None
        )
        # [N] int64 tokens that only the device may know: the newest of each row, and drafts (device_drafts.py)
        self.device_tokens = self._state.device_tokens
        # [max_rows] newest token of each row, also when the host does not know it yet
        self.last_tokens = self._state.last_tokens
        self._on_device: DeviceRows | None = None
        if kernels is not None:
            self._on_device = kernels.DeviceRows(
                max_rows, self._device, self._state.last_tokens, self._state.counts, tile or kernels.Tile()
            )
        kernel = None if self._on_device is None else self._on_device.propose
        self.device_drafts = DeviceDrafts(max_rows, self.device_tokens, ngrams, kernel)
        self._slow_rows = SlowRows()
        self._unfused: set[int] = set()
        """Rows that kernels of the device do not sample."""
        self._depending: set[int] = set()
        """Rows whose tokens depend on the drafts before them, by their distributions or the rejection rule."""
        self._newest_plan: tuple[list[int], Plan] | None = None
        """The rows of the newest plan, and the plan; None after a row has changed."""
        self._draft_plans: dict[tuple[int, ...], DraftPlan] = {}

    def add(
        self,
        row: int,
        params: SamplingParams,
        logprobs: LogprobParams,
        token_ids: list[int],
        num_prompt: int,
        rejects: bool = False,
        most_tokens: int = 0,
    ) -> None:
        """Add a request as `row`; its first `num_prompt` known tokens are prompt, the others earlier output. With
        `rejects` the drafts of a draft model are verified by the rejection rule, unless the request is greedy.
        `most_tokens`: all tokens that the request may get, if the device makes its drafts, else 0. Raises ValueError if
        the row has a request.
        """
        if row in self._state.rows:
            raise ValueError(f"row {row} of the sampler has a request: remove it before another is added")
        alternatives = min(logprobs.alternatives, self._state.vocab_size)
        added = self._state.rows[row] = Row(
            row=row,
            params=replace(params, logit_bias=_summed(params.logit_bias)),
            logprobs=replace(logprobs, wanted=logprobs.wanted or logprobs.alternatives > 0, alternatives=alternatives),
            slot=self._state.counts.take(token_ids, num_prompt) if params.is_penalised else -1,
            rejects=rejects and params.do_sample,
            num_prompt=num_prompt,
            allowed=self._kept(params.allowed_ids) if params.allowed_ids else None,
        )
        if added.reads_history:
            self._state.history.begin(row, token_ids)
        if added.depends_on_history or added.rejects:
            self._depending.add(row)
        if not self._state.planner.is_fused(added):
            self._unfused.add(row)
        elif self._on_device is not None:
            self._on_device.put(added)
        if most_tokens:
            self.device_drafts.add(row, token_ids, most_tokens)
        self.last_tokens[row] = token_ids[-1]
        self._forget_plans()

    def remove(self, row: int) -> None:
        removed = self._state.rows.pop(row)
        if removed.slot >= 0:
            self._state.counts.give_back(removed.slot)
        if self._on_device is not None and removed.is_fused:
            self._on_device.remove(row)
        self._unfused.discard(row)
        self._depending.discard(row)
        self._forget_plans()

    def warm_up(self) -> None:
        """Compile the device's kernels, before there are requests."""
        if self._on_device is not None:
            self._on_device.warm_up(self.vocab_size)
            self.device_drafts.warm_up()

    @property
    def in_graph(self) -> GraphSampling | None:
        """What captured steps sample by; None without kernels."""
        return self._on_device

    def can_sample_in_graph(self, rows: Sequence[int]) -> bool:
        """Whether a captured step can sample one token for each of these rows."""
        return self._on_device is not None and self._unfused.isdisjoint(rows)

    def take_from_graph(self, num_rows: int, num_places: int) -> Sampled:
        """What the newest captured step has sampled for its first `num_rows` rows, of `num_places` whose logits it has.
        Must be called before the next step is launched, which overwrites it.
        """
        assert self._on_device is not None
        return self._on_device.results(num_rows, num_places, self._slow_rows).start_copy()

    def sample(self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int] | torch.Tensor) -> Sampled:
        """Sample one token for each of `rows`.

        logits: [S, V] float32, not changed; positions: [≥ S] of the sampled tokens in their requests. A tensor on the
        device may have further entries, which are not read.
        """
        plan = self._plan_for(list(rows))
        sampled = self._choose_plain(logits, plan.num_alternatives, plan.any_plain, plan.is_fused)
        at = None
        if plan.needs_positions:
            at = positions if isinstance(positions, torch.Tensor) else self._state.planner.tensor(positions)
        self._sample_plan(plan, logits, at, sampled, updates=True)
        if plan.is_fused:
            return sampled.start_copy()
        self.last_tokens.index_copy_(0, plan.rows, sampled.token_ids)
        if plan.counted is not None:
            counted, slots = plan.counted
            self._state.counts.append(slots, sampled.token_ids.index_select(0, counted))
        if plan.recorded is not None and at is not None:
            recorded, device_rows = plan.recorded
            token_ids = sampled.token_ids.index_select(0, recorded)
            self._state.history.write(device_rows, at.index_select(0, recorded), token_ids)
        return sampled.start_copy()

    def verify(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
        draws: DraftDraws | None = None,
        on_device: StepDrafts | None = None,
        at: torch.Tensor | None = None,
    ) -> Sampled:
        """The target's own token at every position of every row, as if all drafts before it had been emitted.

        logits: [S, V], of each of `rows` one more than it has drafts; its first token is at `positions`. The row's
        state continues after the last token that is emitted: the first that is no draft, or the one after all drafts.
        `draws` are those of the draft model in this step; their drafts may be verified by the rejection rule.
        `on_device` names the rows whose drafts the device made: `drafts` has their number, and at, [≥ S], the positions
        of all tokens.
        """
        planner = self._state.planner
        block = Block([self._state.rows[row] for row in rows], positions, drafts)
        any_plain = any(row.is_plain and not planner.is_fused(row) for row in block.rows)
        sampled = self._choose_plain(logits, block.num_alternatives, any_plain, all(map(planner.is_fused, block.rows)))
        if at is None:
            at = planner.tensor(block.positions)
        distributions = None if draws is None else draws.distributions(block)
        for depth, members in enumerate(block.dependency_levels()):
            if depth:
                self._assume_accepted(block, depth)
            if distributions is not None:
                rejecting = [member for member in members if member[1].row in distributions.of]
                members = [member for member in members if member[1].row not in distributions.of]
                for chunk in planner.plan_some(rejecting).chunks:
                    self._sample_chunk(chunk, logits, at, sampled, distributions)
            self._sample_plan(planner.plan_some(members), logits, at, sampled, updates=False)
        self._commit_state(block, sampled, on_device)
        return sampled.start_copy()

    def can_verify_independently(self, rows: Sequence[int], drafted: Sequence[int]) -> bool:
        """Whether `verify_independently` can sample for these rows, some of them drafted."""
        return self._depending.isdisjoint(drafted if self.can_sample_in_graph(rows) else rows)

    def verify_independently(
        self, logits: torch.Tensor, rows: Sequence[int], counts: npt.NDArray[np.int64], positions: torch.Tensor
    ) -> Sampled:
        """`verify` where no token depends on a draft: all are sampled together, by one launch where kernels sample all
        rows. logits: [S, V]; counts: [R] positions of each of `rows`, one more than drafts; positions: [≥ S] of the
        tokens. The newest tokens of rows with drafts are undefined until `device_drafts.advance`, or the next sample:
        the host knows those that it drafted after.
        """
        device_rows = np.repeat(np.array(rows, np.int64), counts)
        if self.can_sample_in_graph(rows):
            assert self._on_device is not None
            sampled = Sampled([0] * len(device_rows), self._device, True, self._slow_rows)
            repeated = to_device(torch.from_numpy(device_rows), self._device)
            self._on_device.sample_rows(logits, repeated, positions, sampled)
            return sampled.start_copy()
        plan = self._plan_for(device_rows.tolist())
        sampled = self._choose_plain(logits, plan.num_alternatives, plan.any_plain, plan.is_fused)
        self._sample_plan(plan, logits, positions, sampled, updates=False)
        lasts = self._state.planner.tensor((np.cumsum(counts) - 1).tolist())
        self.last_tokens.index_copy_(0, self._state.planner.tensor(rows), sampled.token_ids.index_select(0, lasts))
        return sampled.start_copy()

    def begin_drafts(self) -> DraftDraws:
        """Begin to sample a step's drafts from a draft model, with each request's own transforms and noise."""
        return DraftDraws(self._state, self._draft_plans)

    def _choose_plain(
        self, logits: torch.Tensor, num_alternatives: list[int], any_plain: bool, is_fused: bool
    ) -> Sampled:
        """The results of a step, in which only the tokens of plain rows are final: with `any_plain`, every row has the
        arg max of its logits, which is overwritten for all others. is_fused: whether all rows are fused.
        """
        sampled = Sampled(num_alternatives, self._device, is_fused, self._slow_rows)
        if any_plain:
            sampled.token_ids.copy_(arg_max(logits))
            sampled.bad.copy_(_is_bad(logits, sampled.token_ids))
        return sampled

    def _sample_plan(
        self, plan: Plan, logits: torch.Tensor, positions: torch.Tensor | None, sampled: Sampled, updates: bool
    ) -> None:
        """logits: [S, V]; positions: [S], needed where tokens are sampled. `updates`: whether the tokens are the newest
        of their rows, for rows that kernels sample.
        """
        if plan.fused is not None and self._on_device is not None and positions is not None:
            self._on_device.sample(logits, plan.fused, positions, sampled, updates)
        for chunk in plan.chunks:
            self._sample_chunk(chunk, logits, positions, sampled)

    def _assume_accepted(self, block: Block, depth: int) -> None:
        """Continue as if the draft before this depth had been emitted, where the distribution depends on history."""
        columns = self._state.planner.columns
        members = [(row, ids[depth - 1]) for row, ids in block.depending_on_history if len(ids) >= depth]
        self.last_tokens.index_copy_(0, *columns([(row.row, token_id) for row, token_id in members]))
        counted = [(row.slot, token_id) for row, token_id in members if row.slot >= 0]
        if counted:
            self._state.counts.append(*columns(counted))
        if recorded := block.recorded_drafts(depth - 1):
            self._state.history.write(*columns(recorded))

    def _commit_state(self, block: Block, sampled: Sampled, on_device: StepDrafts | None) -> None:
        """Move the rows' state to the last emitted token."""
        tensor, columns, counts = self._state.planner.tensor, self._state.planner.columns, self._state.counts
        firsts = tensor(block.firsts)
        drafted = to_device(torch.tensor(block.padded_drafts(), dtype=torch.long), self._device)
        if on_device:
            width = drafted.shape[1]
            requests = to_device(torch.from_numpy(on_device.table()[0].copy()), self._device)
            drafted.index_copy_(0, requests, self.device_drafts.drafted(on_device)[:, :width])
        last = firsts + num_accepted(sampled.token_ids, sampled.bad, firsts, drafted)
        token_ids = sampled.token_ids.index_select(0, last)
        self.last_tokens.index_copy_(0, tensor([row.row for row in block.rows]), token_ids)
        recorded = [(index, row.row) for index, row in enumerate(block.rows) if row.reads_history]
        if recorded:
            at, device_rows = columns(recorded)
            positions = tensor(block.positions).index_select(0, last.index_select(0, at))
            self._state.history.write(device_rows, positions, token_ids.index_select(0, at))
        counted = [(index, row.slot) for index, row in enumerate(block.rows) if row.slot >= 0]
        if not counted:
            return
        at, slots = columns(counted)
        counts.append(slots, token_ids.index_select(0, at))
        assumed = [
            (slot, token_id, index, block.firsts[index] + depth)
            for index, slot in counted
            for depth, token_id in enumerate(block.drafts[index])
        ]
        if assumed:
            slots, drafted, owners, positions = columns(assumed)
            was_emitted = positions < last.index_select(0, owners)
            counts.add(slots, drafted, -(~was_emitted).to(torch.int32))

    def _kept(self, allowed_ids: Sequence[int]) -> torch.Tensor:
        """[V] bool on the device: whether each token is allowed."""
        kept = torch.zeros(self._state.vocab_size, dtype=torch.bool)
        kept[torch.tensor(allowed_ids, dtype=torch.long)] = True
        return to_device(kept, self._device)

    def _forget_plans(self) -> None:
        self._newest_plan = None
        self._draft_plans.clear()

    def _plan_for(self, rows: list[int]) -> Plan:
        """The plan of a batch, made anew only if its rows differ from those of the newest plan."""
        if self._newest_plan is None or self._newest_plan[0] != rows:
            self._newest_plan = rows, self._state.planner.plan([self._state.rows[row] for row in rows])
        return self._newest_plan[1]

    def _sample_chunk(
        self,
        chunk: Chunk,
        logits: torch.Tensor,
        positions: torch.Tensor | None,
        sampled: Sampled,
        distributions: DraftDistributions | None = None,
    ) -> None:
        """logits: [S, V]; positions: [S], needed where tokens are sampled; distributions: for the rejection rule."""
        scores = logits.index_select(0, chunk.batch_rows)
        raw = scores.clone() if chunk.raw is not None and chunk.modifies_scores else scores
        scores = self._state.distribution(chunk, scores, positions)
        if distributions is None or positions is None:
            token_ids = self._state.choose(chunk, scores, positions)
        else:
            draft_probs, drafted = distributions.select(chunk.batch_rows)
            at = positions.index_select(0, chunk.batch_rows)
            token_ids = rejection_sample(scores, draft_probs, drafted, chunk.seeds, at, self._state.words)
        sampled.token_ids.index_copy_(0, chunk.batch_rows, token_ids)
        sampled.bad.index_copy_(0, chunk.batch_rows, _is_bad(scores, token_ids))
        if chunk.processed is not None:
            sampled.report(chunk.processed, scores, token_ids)
        if chunk.raw is not None:
            sampled.report(chunk.raw, raw, token_ids)


def _kernels() -> Any:
    """The module with a device's kernels, None without triton."""
    try:
        from lorikeet.shard.sampling import device
    except ImportError:
        log.warning("sampling_without_triton", effect="a step with sampled tokens launches some tens of kernels more")
        return None
    return device


def _summed(bias: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Each token once, with the sum of its entries."""
    totals: dict[int, float] = {}
    for token_id, value in bias:
        totals[token_id] = totals.get(token_id, 0.0) + value
    return tuple(totals.items())


def _is_bad(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """scores: [S, V]; token_ids: [S], highest or sampled. Returns [S] bool: NaN, infinite, or nothing to sample."""
    return ~scores.gather(1, token_ids[:, None])[:, 0].isfinite()

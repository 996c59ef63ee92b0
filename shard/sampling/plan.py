"""The rows of one batch, cut into chunks of similar rows, with their parameters as tensors on the device; and what
sampling keeps on the device for the rows of running requests.

A plan is made once and used for as long as the batch has the same rows: building a step then costs nothing. Nothing is
read from the device, so a step may be sampled before the one before it is known to the host.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isfinite, log

import torch

from lorikeet.proto.params import LogprobParams, SamplingParams
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.sampling import filters
from lorikeet.shard.sampling.filters import arg_max
from lorikeet.shard.sampling.masks import Allowed, BadWords, History, Masks, MinTokens
from lorikeet.shard.sampling.noise import Purpose, as_signed, log_exponentials, row_keys, token_words
from lorikeet.shard.sampling.penalties import Bias, Penalties, TokenCounts, Watermark
from lorikeet.shard.speculation.device.device_drafts import num_device_tokens

_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Scores processed at once: on CPU they stay in a core's cache, on CUDA they bound scratch memory."""

_COLDEST = 1e-6
"""At lower temperatures only the highest score can be sampled, and dividing by much less would overflow."""


@dataclass(frozen=True)
class Row:
    """One request of the sampler."""

    row: int
    params: SamplingParams
    logprobs: LogprobParams
    slot: int
    """Row of the token counts, -1 without penalties."""
    rejects: bool = False
    """Whether a draft model's drafts are verified by the rejection rule. Never of a greedy row."""
    num_prompt: int = 0
    # [V] bool on the device, None for all
    allowed: torch.Tensor | None = None

    @property
    def do_sample(self) -> bool:
        """Whether its tokens are sampled; else they are the arg max."""
        return self.params.do_sample

    @property
    def has_logit_processors(self) -> bool:
        """Whether anything is added to its logits."""
        params = self.params
        return self.slot >= 0 or bool(params.logit_bias) or params.watermark or params.has_masks

    @property
    def depends_on_history(self) -> bool:
        """Whether its distribution depends on earlier tokens by more than the logits."""
        return self.params.depends_on_history

    @property
    def reads_history(self) -> bool:
        """Whether its masks depend on several tokens before."""
        return self.params.reads_history

    @property
    def seed(self) -> int:
        """The seed, as a signed number."""
        return as_signed(self.params.seed)

    @property
    def is_fused(self) -> bool:
        """Whether the kernels of a device can sample its tokens (triton.py)."""
        return not (self.params.watermark or self.params.bad_words or self.rejects or self.logprobs.alternatives)

    @property
    def is_plain(self) -> bool:
        """Whether only the arg max of its unchanged logits is wanted, without a log probability."""
        return not (self.do_sample or self.has_logit_processors or self.logprobs.wanted)


def filters_of(params: SamplingParams) -> tuple[float, float, float, float]:
    """Temperature, top_p, log of min_p and typical_p, as they are applied."""
    log_min_p = log(params.min_p) if params.min_p > 0 else -inf
    return max(params.temperature, _COLDEST), params.top_p, log_min_p, params.typical_p


@dataclass(frozen=True)
class Fused:
    """The rows of a batch that the kernels of a device sample."""

    # [n] rows of the batch, [n] their device rows
    indices: torch.Tensor
    rows: torch.Tensor
    any_filters: bool
    """Whether one of them has a filter."""


@dataclass(frozen=True)
class Filter:
    """One filter for n rows of a chunk."""

    # [n] rows of the chunk, None for all
    rows: torch.Tensor | None
    # [n, 1] its parameter
    values: torch.Tensor
    largest: int = 0
    """The largest value, of integer parameters."""


@dataclass(frozen=True)
class Wanted:
    """Log probabilities of one distribution for n rows of a chunk."""

    # [n] rows of the chunk
    rows: torch.Tensor
    # [n] rows of the batch
    batch_rows: torch.Tensor
    num_alternatives: int
    """The most that any of them asked for."""
    # [m] of the n rows that name their alternatives, [m, k] these, filled up with zeros; None where no row does
    named: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class Chunk:
    """Some rows of a batch that are processed together: all sampled, or all arg max."""

    # [S'] rows of the batch
    batch_rows: torch.Tensor
    members: list[int]
    """The same for the host."""
    do_sample: bool
    masks: Masks | None
    bias: Bias | None
    # [n] rows of the chunk with a watermark, [n] their device rows
    watermarked: tuple[torch.Tensor, torch.Tensor] | None
    penalties: Penalties | None
    # [S'] int64
    seeds: torch.Tensor
    # [S', 1]
    temperature: torch.Tensor
    top_k: Filter | None
    top_p: Filter | None
    min_p: Filter | None
    typical_p: Filter | None
    raw: Wanted | None
    processed: Wanted | None

    @property
    def modifies_scores(self) -> bool:
        """Whether the distribution differs from that of the model's logits."""
        return self.do_sample or bool(self.masks or self.bias or self.penalties) or self.watermarked is not None


@dataclass(frozen=True)
class Plan:
    """How one batch of rows is sampled."""

    # [S] device rows
    rows: torch.Tensor
    fused: Fused | None
    chunks: list[Chunk]
    """Chunks of the rows that are neither fused nor plain."""
    any_plain: bool
    """Whether one of these rows is plain: in no chunk, but the arg max of its logits."""
    needs_positions: bool
    """Whether sampling depends on the positions of the tokens."""
    num_alternatives: list[int]
    # [n] rows of the chunks with penalties, [n] their rows of the token counts
    counted: tuple[torch.Tensor, torch.Tensor] | None
    # [n] rows of the chunks that read the history, [n] their device rows
    recorded: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def is_fused(self) -> bool:
        """Whether kernels of the device sample all rows."""
        return self.fused is not None and self.fused.rows.shape == self.rows.shape


class Planner:
    """Makes plans for one device and vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device, fuses: bool = False) -> None:
        """`fuses`: whether kernels of the device sample the rows that they support."""
        self._device, self._fuses = device, fuses
        self._chunk_rows = max(1, _CHUNK_ELEMENTS[device.type] // vocab_size)

    def plan(self, rows: Sequence[Row]) -> Plan:
        return self.plan_some(list(enumerate(rows)))

    def is_fused(self, row: Row) -> bool:
        """Whether kernels of the device sample it."""
        return self._fuses and row.is_fused

    def plan_some(self, indexed: Sequence[tuple[int, Row]], may_fuse: bool = True) -> Plan:
        """Plan for some rows of the batch, each with its index there. Without `may_fuse` all rows are in chunks."""
        fused = [(index, row) for index, row in indexed if may_fuse and self.is_fused(row)]
        others = [(index, row) for index, row in indexed if not (may_fuse and self.is_fused(row))]
        sampled = [(index, row) for index, row in others if row.do_sample]
        greedy = [(index, row) for index, row in others if not row.do_sample and not row.is_plain]
        chunks = []
        for kind in (sampled, greedy):
            for start in range(0, len(kind), self._chunk_rows):
                chunks.append(self._chunk(kind[start : start + self._chunk_rows]))
        return Plan(
            rows=self.tensor([row.row for _, row in indexed]),
            fused=self._fused(fused),
            chunks=chunks,
            any_plain=any(row.is_plain for _, row in others),
            needs_positions=bool(fused) or any(row.do_sample or row.params.has_masks for _, row in others),
            num_alternatives=[row.logprobs.alternatives for _, row in indexed],
            counted=self.pair([(index, row.slot) for index, row in others if row.slot >= 0]),
            recorded=self.pair([(index, row.row) for index, row in others if row.reads_history]),
        )

    def _fused(self, members: list[tuple[int, Row]]) -> Fused | None:
        found = self.pair([(index, row.row) for index, row in members])
        if found is None:
            return None
        defaults = SamplingParams()
        names = ("top_k", "top_p", "min_p", "typical_p")
        any_filters = any(
            row.do_sample and any(getattr(row.params, name) != getattr(defaults, name) for name in names)
            for _, row in members
        )
        return Fused(*found, any_filters)

    def tensor(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype = torch.long) -> torch.Tensor:
        """[n] on the device, without waiting for it."""
        return to_device(torch.tensor(values, dtype=dtype), self._device)

    def columns(self, table: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The columns of a table that is not empty, as tensors."""
        return [self.tensor(column) for column in zip(*table, strict=True)]

    def pair(self, table: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both columns of a table, None of an empty one."""
        if not table:
            return None
        first, second = self.columns(table)
        return first, second

    def _chunk(self, members: list[tuple[int, Row]]) -> Chunk:
        rows = [row for _, row in members]
        return Chunk(
            batch_rows=self.tensor([index for index, _ in members]),
            members=[index for index, _ in members],
            do_sample=rows[0].do_sample,
            masks=self._masks(rows),
            bias=self._bias(rows),
            watermarked=self.pair([(at, row.row) for at, row in enumerate(rows) if row.params.watermark]),
            penalties=self._penalties(rows),
            seeds=self.tensor([row.seed for row in rows]),
            temperature=self._column([filters_of(row.params)[0] for row in rows]),
            top_k=self._filter(rows, lambda params: params.top_k, lambda value: value > 0, torch.long),
            top_p=self._filter(rows, lambda params: params.top_p, lambda value: value < 1.0),
            min_p=self._filter(rows, lambda params: filters_of(params)[2], isfinite),
            typical_p=self._filter(rows, lambda params: params.typical_p, lambda value: value < 1.0),
            raw=self._wanted(members, raw=True),
            processed=self._wanted(members, raw=False),
        )

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return self.tensor(values, torch.float32)[:, None]

    def _filter(
        self,
        rows: list[Row],
        value_of: Callable[[SamplingParams], float],
        is_used: Callable[[float], bool],
        dtype: torch.dtype = torch.float32,
    ) -> Filter | None:
        values = {at: value for at, row in enumerate(rows) if is_used(value := value_of(row.params))}
        if not values:
            return None
        used = None if len(values) == len(rows) else self.tensor(list(values))
        return Filter(used, self.tensor(list(values.values()), dtype)[:, None], int(max(values.values())))

    def _masks(self, rows: list[Row]) -> Masks | None:
        if not any(row.params.has_masks for row in rows):
            return None
        return Masks(self._allowed(rows), self._bad_words(rows), self._min_tokens(rows))

    def _allowed(self, rows: list[Row]) -> Allowed | None:
        used = [(at, row.allowed) for at, row in enumerate(rows) if row.allowed is not None]
        if not used:
            return None
        return Allowed(self.tensor([at for at, _ in used]), torch.stack([kept for _, kept in used]))

    def _bad_words(self, rows: list[Row]) -> BadWords | None:
        words = [(at, row, word) for at, row in enumerate(rows) for word in row.params.bad_words]
        if not words:
            return None
        width = max(len(word) for _, _, word in words) - 1
        before = [[*reversed(word[:-1]), *[-1] * (width + 1 - len(word))] for _, _, word in words]
        return BadWords(
            rows=self.tensor([at for at, _, _ in words]),
            device_rows=self.tensor([row.row for _, row, _ in words]),
            before=to_device(torch.tensor(before, dtype=torch.long), self._device),
            last_ids=self.tensor([word[-1] for _, _, word in words]),
            earliest=self.tensor([row.num_prompt + len(word) - 1 for _, row, word in words]),
        )

    def _min_tokens(self, rows: list[Row]) -> MinTokens | None:
        entries = [
            (at, stop_id, row.num_prompt + row.params.min_tokens)
            for at, row in enumerate(rows)
            if row.params.min_tokens
            for stop_id in row.params.min_tokens_stop_ids
        ]
        return MinTokens(*self.columns(entries)) if entries else None

    def _bias(self, rows: list[Row]) -> Bias | None:
        entries = [(at, token_id, value) for at, row in enumerate(rows) for token_id, value in row.params.logit_bias]
        if not entries:
            return None
        at, ids, values = zip(*entries, strict=True)
        return Bias(self.tensor(at), self.tensor(ids), self.tensor(values, torch.float32))

    def _penalties(self, rows: list[Row]) -> Penalties | None:
        used = [(at, row) for at, row in enumerate(rows) if row.slot >= 0]
        if not used:
            return None
        return Penalties(
            rows=self.tensor([at for at, _ in used]),
            slots=self.tensor([row.slot for _, row in used]),
            repetition=self._column([row.params.repetition_penalty for _, row in used]),
            frequency=self._column([row.params.frequency_penalty for _, row in used]),
            presence=self._column([row.params.presence_penalty for _, row in used]),
        )

    def _wanted(self, members: list[tuple[int, Row]], raw: bool) -> Wanted | None:
        asked = [
            (at, index, row.logprobs)
            for at, (index, row) in enumerate(members)
            if row.logprobs.wanted and row.logprobs.raw == raw
        ]
        if not asked:
            return None
        return Wanted(
            rows=self.tensor([at for at, _, _ in asked]),
            batch_rows=self.tensor([index for _, index, _ in asked]),
            num_alternatives=max(logprobs.alternatives for _, _, logprobs in asked),
            named=self._named([logprobs.alternative_ids for _, _, logprobs in asked]),
        )

    def _named(self, alternatives: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Alternatives that rows name, as in `Wanted`."""
        if not any(alternatives):
            return None
        width = max(map(len, alternatives))
        filled = [[*ids, *[0] * (width - len(ids))] for ids in alternatives if ids]
        table = to_device(torch.tensor(filled, dtype=torch.long), self._device)
        return self.tensor([at for at, ids in enumerate(alternatives) if ids]), table


class Block:
    """R rows with S positions in all: each row has adjacent positions, one more than drafts."""

    def __init__(self, rows: Sequence[Row], positions: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        self.rows = rows
        self.drafts = drafts
        widths = [1 + len(ids) for ids in drafts]
        self.firsts = [end - width for end, width in zip(accumulate(widths), widths, strict=True)]
        """Index of each row's first position in the block."""
        self.num_tokens = sum(widths)
        self.positions = [
            first + depth for first, width in zip(positions, widths, strict=True) for depth in range(width)
        ]
        """[S] of the sampled tokens in their requests."""
        self.num_alternatives = [
            row.logprobs.alternatives for row, width in zip(rows, widths, strict=True) for _ in range(width)
        ]
        self.depending_on_history = [
            (row, ids) for row, ids in zip(rows, drafts, strict=True) if row.depends_on_history and ids
        ]

    def dependency_levels(self) -> Iterator[list[tuple[int, Row]]]:
        """Positions that can be sampled together, each with its row: one level per depth where distributions depend on
        the draft before; all others are in the first level.
        """
        levels: list[list[tuple[int, Row]]] = [[]]
        for row, ids, first in zip(self.rows, self.drafts, self.firsts, strict=True):
            for depth in range(1 + len(ids)):
                level = depth if row.depends_on_history else 0
                levels.extend([] for _ in range(level + 1 - len(levels)))
                levels[level].append((first + depth, row))
        yield from levels

    def recorded_drafts(self, depth: int) -> list[tuple[int, int, int]]:
        """Drafts of rows that read the history: device row, position and token of the draft at this depth."""
        return [
            (row.row, self.positions[first + depth], ids[depth])
            for row, ids, first in zip(self.rows, self.drafts, self.firsts, strict=True)
            if row.reads_history and len(ids) > depth
        ]

    def padded_drafts(self) -> list[list[int]]:
        """[R][D] each row's drafts; -1, which no token equals, where it has fewer."""
        width = max(map(len, self.drafts))
        return [[*ids, *[-1] * (width - len(ids))] for ids in self.drafts]


def num_accepted(
    token_ids: torch.Tensor, bad: torch.Tensor, firsts: torch.Tensor, drafted: torch.Tensor
) -> torch.Tensor:
    """token_ids: [S] the target's own; bad: [S]; firsts: [R] each row's first index in S; drafted: [R, D], -1 for no
    draft. Returns [R]: the drafts of each row that are emitted.
    """
    here = firsts[:, None] + torch.arange(drafted.shape[1], device=firsts.device)
    ahead = (here + 1).clamp(max=len(token_ids) - 1)
    here = here.clamp(max=len(token_ids) - 1)
    is_accepted = (token_ids[here] == drafted) & ~bad[ahead]
    return is_accepted.cumprod(dim=1).sum(dim=1)


class RowState:
    """The newest tokens of each row, the counts of penalties, and the parameters of the requests."""

    def __init__(
        self, vocab_size: int, max_rows: int, device: torch.device, gamma: float, delta: float, fuses: bool
    ) -> None:
        """`gamma` and `delta` are those of the watermark; `fuses`: whether kernels of the device sample rows."""
        self.vocab_size = vocab_size
        # [N] int64 newest token of each row, then drafts, in one tensor for captured steps
        self.device_tokens = torch.zeros(num_device_tokens(max_rows), dtype=torch.long, device=device)
        # [max_rows] newest token of each row, also when the host does not know it yet
        self.last_tokens = self.device_tokens[:max_rows]
        # [V] int64 by token id
        self.words = token_words(vocab_size, device)
        self.counts = TokenCounts(vocab_size, device)
        self.history = History(max_rows, device)
        self.planner = Planner(vocab_size, device, fuses)
        self.rows: dict[int, Row] = {}
        self._watermark = Watermark(self.words, gamma, delta)

    def distribution(self, chunk: Chunk, scores: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """scores: [S', V], perhaps changed in place; positions: [S], needed for masks. Returns [S', V]: the scores that
        tokens are chosen by.
        """
        if chunk.masks is not None and positions is not None:
            chunk.masks.apply(scores, positions[chunk.batch_rows], self.history)
        if chunk.bias is not None:
            chunk.bias.apply(scores)
        if chunk.watermarked is not None:
            at, rows = chunk.watermarked
            self._watermark.apply(scores, at, self.last_tokens.index_select(0, rows))
        if chunk.penalties is not None:
            chunk.penalties.apply(scores, self.counts)
        return _filter(chunk, scores.div_(chunk.temperature)) if chunk.do_sample else scores

    def choose(
        self, chunk: Chunk, scores: torch.Tensor, positions: torch.Tensor | None, purpose: Purpose = Purpose.DRAW
    ) -> torch.Tensor:
        """scores: [S', V]; positions: [S], needed where tokens are sampled. Returns [S'] tokens: sampled, or the
        highest.
        """
        if not chunk.do_sample or positions is None:
            return arg_max(scores)
        keys = row_keys(chunk.seeds, positions.index_select(0, chunk.batch_rows), purpose)
        return arg_max(scores - log_exponentials(self.words, keys))


def _filter(chunk: Chunk, scores: torch.Tensor) -> torch.Tensor:
    """scores: [S', V] after temperature, perhaps changed in place."""
    first_check = filters.FIRST_CHECK
    if chunk.top_k is not None and chunk.top_k.rows is None:
        first_check = min(chunk.top_k.largest, first_check)
    steps: list[tuple[Filter | None, Callable[[torch.Tensor, Filter], torch.Tensor]]] = [
        (chunk.top_k, lambda part, used: filters.top_k(part, used.values, used.largest)),
        (chunk.top_p, lambda part, used: filters.top_p(part, used.values, first_check)),
        (chunk.min_p, lambda part, used: filters.min_p(part, used.values)),
        (chunk.typical_p, lambda part, used: filters.typical_p(part, used.values, first_check)),
    ]
    for used, apply in steps:
        if used is not None:
            if used.rows is None:
                scores = apply(scores, used)
            else:
                scores.index_copy_(0, used.rows, apply(scores.index_select(0, used.rows), used))
    return scores

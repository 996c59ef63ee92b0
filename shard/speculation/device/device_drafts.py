"""Drafts and acceptance on the device: the host launches a step before it knows the tokens of the last one.

Each row has its text on the device. After a step it is extended by the tokens that the step emitted; prompt lookup in
it, and the heads of the last emitted token, make the drafts of the next step. Inputs, attention and sampling add the
number of accepted drafts to the positions of that step. In vLLM this is asynchronous scheduling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.requests.request import Source
from lorikeet.shard.speculation.lookup import Lookup

MOST_DRAFTS = 16
"""Most drafts of a row in a step."""
SOURCES = (Source.LOOKUP, Source.MEDUSA)
"""Index of each source in the table of drafts."""
BLOCK = 1024
"""Tokens of a row's text at first; the longest request so far adds multiples of it."""
NO_TOKEN = -1


def num_device_tokens(max_rows: int) -> int:
    """Newest tokens and drafts of all rows."""
    return max_rows * (1 + len(SOURCES) * MOST_DRAFTS)


class Texts(NamedTuple):
    """What the device knows of each row."""

    # [max_rows, width] int32 known tokens of each row
    token_ids: torch.Tensor
    # [max_rows] int64 number of known tokens
    lengths: torch.Tensor
    # [len(SOURCES), max_rows, MOST_DRAFTS] int64 drafts after the newest token, NO_TOKEN where there is none
    draft_ids: torch.Tensor
    # [max_rows] int64 newest token of each row
    last_tokens: torch.Tensor


class Emitted(NamedTuple):
    """What a step sampled for n rows."""

    # [4, n] int64: row, index of its first token in `token_ids`, index of its first token in `head_ids`, and the number
    # of tokens there for each of its sampled tokens, 0 without heads
    table: torch.Tensor
    # [n] int64 how many drafts were accepted: as many tokens and one were emitted
    num_accepted: torch.Tensor
    # [S] int64 tokens of the target
    token_ids: torch.Tensor
    # [E] int64 tokens of heads
    head_ids: torch.Tensor


Propose = Callable[[Texts, Emitted, range], None]
"""Extends the texts, and makes the next drafts with matches of so many tokens: `propose` or a kernel of the device."""


@dataclass
class StepDrafts:
    """The rows of one step whose drafts the device makes, as host lists."""

    requests: list[int] = field(default_factory=list)
    """Their indices among the requests for which the step samples."""
    rows: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    """Index of the first sampled token of each in S."""
    widths: list[int] = field(default_factory=list)
    """Number of their drafts in this step."""
    sources: list[int] = field(default_factory=list)
    """Index of their source in SOURCES."""
    first_heads: list[int] = field(default_factory=list)
    num_heads: list[int] = field(default_factory=list)
    inputs: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Drafts among the step's tokens: index in T, source, row, depth."""

    def add(self, request: int, row: int, sampled: range, source: int, heads: tuple[int, int]) -> None:
        """A request with these sampled tokens; `heads`: index of its first token of heads, and their number."""
        self.requests.append(request)
        self.rows.append(row)
        self.firsts.append(sampled.start)
        self.widths.append(len(sampled) - 1)
        self.sources.append(SOURCES.index(Source(source)) if source in SOURCES else 0)
        self.first_heads.append(heads[0])
        self.num_heads.append(heads[1])


class DeviceDrafts:
    """The texts and drafts of all rows."""

    def __init__(
        self, max_rows: int, tokens: torch.Tensor, ngrams: tuple[int, int], kernel: Propose | None = None
    ) -> None:
        """tokens: [num_device_tokens(max_rows)] int64, of which the first are the newest token of each row; ngrams:
        tokens of the shortest and the longest match.
        """
        self._max_rows, self._device = max_rows, tokens.device
        device = tokens.device
        self._ngrams = range(ngrams[0], ngrams[1] + 1)
        self._propose = kernel or propose
        self.is_available = kernel is not None or device.type == "cpu"
        """Whether drafts are made without waiting for the device."""
        # as in Texts
        self._texts = torch.zeros(max_rows, BLOCK, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._last_tokens = tokens[:max_rows]
        self._draft_ids = tokens[max_rows:].view(len(SOURCES), max_rows, MOST_DRAFTS).fill_(NO_TOKEN)
        # [max_rows] int64 drafts of the newest step that were accepted
        self.num_accepted = torch.zeros(max_rows, dtype=torch.long, device=device)
        # [1] in place of the tokens of heads
        self._no_ids = torch.zeros(1, dtype=torch.long, device=device)

    def add(self, row: int, token_ids: Sequence[int], most_tokens: int) -> None:
        """Begin a row with these known tokens, of which there will be `most_tokens`."""
        num_blocks = -(-(most_tokens + 1 + MOST_DRAFTS) // BLOCK)  # a step after the last token may run
        if (missing := num_blocks * BLOCK - self._texts.shape[1]) > 0:
            self._texts = torch.nn.functional.pad(self._texts, (0, missing))
        self._texts[row, : len(token_ids)].copy_(to_device(torch.tensor(token_ids, dtype=torch.int32), self._device))
        self._lengths[row] = len(token_ids)
        self._draft_ids[:, row] = NO_TOKEN

    def warm_up(self) -> None:
        """Compile the kernel: draft for row 0, which no request has."""
        self.add(0, [0], 1)
        zeros = torch.zeros(1, dtype=torch.long, device=self._device)
        self._propose(self._state, Emitted(zeros.repeat(4, 1), zeros, zeros, zeros), self._ngrams)

    def place(self, source: int, row: int, depth: int) -> int:
        """Where `tokens` has a row's draft. Where there is none, it has NO_TOKEN."""
        return self._max_rows + (source * self._max_rows + row) * MOST_DRAFTS + depth

    def drafted(self, step: StepDrafts) -> torch.Tensor:
        """[n, MOST_DRAFTS] the drafts that the step verifies, NO_TOKEN beyond them."""
        sources, rows, widths = self._columns(list(zip(step.sources, step.rows, step.widths, strict=True)))
        depths = torch.arange(MOST_DRAFTS, device=self._device)
        return self._draft_ids[sources, rows].masked_fill_(depths >= widths[:, None], NO_TOKEN)

    def advance(
        self,
        step: StepDrafts,
        token_ids: torch.Tensor,
        num_accepted: torch.Tensor | None,
        head_ids: torch.Tensor | None,
    ) -> None:
        """Extend the texts by what the step emitted, and make the next drafts. token_ids: [S]; num_accepted: [R] of all
        requests for which the step samples, None of a step without drafts; head_ids: [E] tokens of heads.
        """
        table = [step.rows, step.firsts, step.first_heads, step.num_heads, step.requests]
        numbers = to_device(torch.tensor(table, dtype=torch.long), self._device)
        if num_accepted is None:
            accepted = torch.zeros_like(numbers[0])
        else:
            accepted = num_accepted.index_select(0, numbers[-1])
        self.num_accepted.index_copy_(0, numbers[0], accepted)
        head_ids = self._no_ids if head_ids is None else head_ids
        self._propose(self._state, Emitted(numbers[:-1], accepted, token_ids, head_ids), self._ngrams)

    @property
    def _state(self) -> Texts:
        return Texts(self._texts, self._lengths, self._draft_ids, self._last_tokens)

    def _columns(self, table: Sequence[Sequence[int]]) -> Any:
        return to_device(torch.tensor(list(zip(*table, strict=True)), dtype=torch.long), self._device)


def propose(texts: Texts, emitted: Emitted, ngrams: range) -> None:
    """The specification, on CPU: prompt lookup is that of the host."""
    columns = [*emitted.table.tolist(), emitted.num_accepted.tolist()]
    for row, first, first_head, num_heads, accepted in zip(*columns, strict=True):
        before, new = int(texts.lengths[row]), emitted.token_ids[first : first + accepted + 1]
        length = min(before + len(new), texts.token_ids.shape[1])
        texts.token_ids[row, before:length] = new[: length - before].to(torch.int32)
        texts.lengths[row] = length
        texts.last_tokens[row] = new[-1]
        found = Lookup(texts.token_ids[row, :length].tolist(), ngrams[0], ngrams[-1]).propose(MOST_DRAFTS)
        at = first_head + accepted * num_heads
        for source, ids in enumerate((found, emitted.head_ids[at : at + num_heads].tolist())):
            row_ids = texts.draft_ids[source, row]
            row_ids.fill_(NO_TOKEN)
            row_ids[: len(ids)] = torch.tensor(ids, dtype=torch.long)

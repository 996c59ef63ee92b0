"""Drafts and acceptance on the device: the host launches a step before it knows the tokens of the last one.

Each row has its text on the device. After a step the device counts the drafts that the step accepted and extends the
text by the emitted tokens; prompt lookup in it, and the heads of the last emitted token, make the drafts of the next
step. Inputs, attention and sampling add the number of accepted drafts to the positions of that step. In vLLM this is
asynchronous scheduling. The host learns with a step's result what was verified, and whether there are further drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.requests.request import Source
from lorikeet.shard.speculation.lookup import Lookup

MOST_DRAFTS = 16
"""Most drafts of a row in a step."""
SOURCES = (Source.LOOKUP, Source.MEDUSA)
"""Index of each source in the table of drafts."""
_INDICES: npt.NDArray[np.int64] = np.zeros(256, np.int64)
_INDICES[list(SOURCES)] = range(len(SOURCES))
BLOCK = 1024
"""Tokens of a row's text at first; the longest request so far adds multiples of it."""
NO_TOKEN = -1


def num_device_tokens(max_rows: int) -> int:
    """Newest tokens and drafts of all rows."""
    return max_rows * (1 + len(SOURCES) * MOST_DRAFTS)


def device_sources(sources: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[n] the index of each source in the table of drafts; that of prompt lookup for sources that are not there."""
    return _INDICES[sources]


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
    # [max_rows] int64 drafts of the newest step that were accepted
    num_accepted: torch.Tensor


class Emitted(NamedTuple):
    """What a step sampled for n rows."""

    # [6, n] int64: row, index of its first token in `token_ids`, number of its drafts, index of their source in
    # SOURCES, index of its first token in `head_ids`, and the number of tokens there for each of its sampled tokens
    table: torch.Tensor
    # [S] int64 tokens of the target, of each row one more than drafts
    token_ids: torch.Tensor
    # [S] uint8 whether a token's scores were bad: it and those after it are not emitted
    bad: torch.Tensor
    # [E] int64 tokens of heads
    head_ids: torch.Tensor
    # [n, MOST_DRAFTS + 1] int64, filled in: the drafts that were verified, NO_TOKEN where there was none, and the
    # length of the match that the next drafts of prompt lookup continue, 0 without one
    report: torch.Tensor


Propose = Callable[[Texts, Emitted, range], None]
"""Counts accepted drafts, extends the texts, and makes the next drafts with matches of so many tokens: `propose` or a
kernel of the device.
"""

Table = npt.NDArray[np.int64]


@dataclass
class StepDrafts:
    """The rows of one step whose drafts the device makes."""

    # [7, m] of requests that only decode: index among those for which the step samples, then as in `Emitted.table`
    decoding: Table = field(default_factory=lambda: np.empty((7, 0), np.int64))
    columns: list[tuple[int, ...]] = field(default_factory=list)
    """The same seven numbers for each further request."""
    inputs: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Drafts of those among the step's tokens: index in T, source, row, depth."""

    def __len__(self) -> int:
        return self.decoding.shape[1] + len(self.columns)

    def add(self, request: int, row: int, sampled: range, source: int, heads: tuple[int, int]) -> int:
        """A request with these sampled tokens; `heads`: index of its first token of heads, and their number. Returns
        the index of its source.
        """
        index = int(device_sources(np.array(source)))
        self.columns.append((request, row, sampled.start, len(sampled) - 1, index, *heads))
        return index

    def table(self) -> Table:
        """[7, n] of all requests."""
        if not self.columns:
            return self.decoding
        return np.concatenate([self.decoding, np.array(self.columns, np.int64).T], axis=1)


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
        report = torch.empty(1, MOST_DRAFTS + 1, dtype=torch.long, device=self._device)
        emitted = Emitted(zeros.repeat(6, 1), zeros, zeros.to(torch.uint8), zeros, report)
        self._propose(self._state, emitted, self._ngrams)

    def place(self, source: Any, row: Any, depth: Any) -> Any:
        """Where `tokens` has a row's draft, or drafts of several rows. Where there is none, it has NO_TOKEN."""
        return self._max_rows + (source * self._max_rows + row) * MOST_DRAFTS + depth

    def drafted(self, step: StepDrafts) -> torch.Tensor:
        """[n, MOST_DRAFTS] the drafts that the step verifies, NO_TOKEN beyond them."""
        _, rows, _, widths, sources, *_ = to_device(torch.from_numpy(step.table()), self._device)
        depths = torch.arange(MOST_DRAFTS, device=self._device)
        return self._draft_ids[sources, rows].masked_fill_(depths >= widths[:, None], NO_TOKEN)

    def advance(
        self, step: StepDrafts, token_ids: torch.Tensor, bad: torch.Tensor, head_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Extend the texts by what the step emitted, and make the next drafts. token_ids: [S]; bad: [S] bool; head_ids:
        [E] tokens of heads. Returns `Emitted.report`.
        """
        table = to_device(torch.from_numpy(step.table()[1:].copy()), self._device)
        report = torch.empty(len(step), MOST_DRAFTS + 1, dtype=torch.long, device=self._device)
        head_ids = self._no_ids if head_ids is None else head_ids
        self._propose(self._state, Emitted(table, token_ids, bad.view(torch.uint8), head_ids, report), self._ngrams)
        return report

    @property
    def _state(self) -> Texts:
        return Texts(self._texts, self._lengths, self._draft_ids, self._last_tokens, self.num_accepted)


def propose(texts: Texts, emitted: Emitted, ngrams: range) -> None:
    """The specification, on CPU: prompt lookup is that of the host."""
    bad = emitted.bad.tolist()
    for index, (row, first, width, source, first_head, num_heads) in enumerate(emitted.table.T.tolist()):
        drafted = texts.draft_ids[source, row, :width].tolist()
        accepted = 0
        while accepted < width and drafted[accepted] == emitted.token_ids[first + accepted]:
            if bad[first + accepted + 1]:
                break
            accepted += 1
        texts.num_accepted[row] = accepted
        before, new = int(texts.lengths[row]), emitted.token_ids[first : first + accepted + 1]
        length = min(before + len(new), texts.token_ids.shape[1])
        texts.token_ids[row, before:length] = new[: length - before].to(torch.int32)
        texts.lengths[row] = length
        texts.last_tokens[row] = new[-1]
        lookup = Lookup(texts.token_ids[row, :length].tolist(), ngrams[0], ngrams[-1])
        emitted.report[index] = NO_TOKEN
        emitted.report[index, :width] = torch.tensor(drafted, dtype=torch.long)
        emitted.report[index, MOST_DRAFTS] = lookup.match_length
        at = first_head + accepted * num_heads
        for source, ids in enumerate((lookup.propose(MOST_DRAFTS), emitted.head_ids[at : at + num_heads].tolist())):
            row_ids = texts.draft_ids[source, row]
            row_ids.fill_(NO_TOKEN)
            row_ids[: len(ids)] = torch.tensor(ids, dtype=torch.long)

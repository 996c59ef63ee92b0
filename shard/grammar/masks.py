"""Masks the logits of constrained requests: one row for every sampled position, those after drafts included."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import structlog
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.grammar.matcher import APART_S, Bitmask, GrammarMatcher, raise_unless_library, reason
from lorikeet.shard.requests.request import ScheduledRequest

log = structlog.get_logger()

_WORD = 32
Rows = tuple[LLMatcher, int, list[int]]
"""A matcher, the first of its rows, and the draft tokens that its other rows follow."""
MEASURED_STEPS = 8
"""After a step whose masks took long, so many have theirs computed one by one, which shows whose take long."""


class GrammarMasks:
    """The masks of one step at a time."""

    def __init__(self, vocab_size: int, device: torch.device | None = None) -> None:
        """`device` is that of the logits."""
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // _WORD)
        self._executor = LLExecutor(num_threads=1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        self._filling: Future[Bitmask] | None = None
        self._rows: list[int] = []
        self._num_measured = 0
        """Further steps whose masks are computed one by one."""
        self._device = device or torch.device("cpu")
        self._mask_rows = mask_rows if self._device.type == "cpu" else _device_kernel()

    def warm_up(self) -> None:
        """Compile the device's kernel, which would otherwise happen in the first step with a constrained request."""
        if self._device.type == "cpu":
            return
        logits = torch.zeros(1, self._vocab_size, device=self._device)
        packed = torch.zeros(1, 1 + self._num_words, dtype=torch.int32, device=self._device)
        self._mask_rows(logits, packed)

    def start(self, scheduled: Sequence[ScheduledRequest], num_before: int = 0) -> None:
        """Begin to fill the masks of a step whose drafts are known, next to the forward pass. num_before: sampled rows
        before those of `scheduled`.
        """
        self._rows, self._filling = [], None
        jobs: list[tuple[GrammarMatcher, Sequence[int], frozenset[int]]] = []
        first = num_before
        for item in scheduled:
            constraint = item.request.constraint
            if item.samples and isinstance(constraint, GrammarMatcher):
                jobs.append((constraint, item.draft_ids, item.request.stop_ids))
                self._rows += range(first, first + item.num_sampled)
            first += item.num_sampled
        if jobs:
            self._filling = self._thread.submit(self._fill, jobs)

    @property
    def is_needed(self) -> bool:
        """Whether the step has masks, from `start` on."""
        return self._filling is not None

    def wait(self) -> None:
        """Return once no thread reads a matcher any more, after a forward pass that failed."""
        if self._filling is not None:
            self._filling.exception()
            self._filling = None

    def apply(self, logits: torch.Tensor) -> None:
        """logits: [S, V], changed in place: tokens that the grammar does not allow become -inf."""
        if self._filling is None:
            return
        bitmask = self._filling.result()
        if logits.device.type == "cpu":
            self._mask_on_cpu(logits, bitmask)
            return
        packed = np.concatenate((np.array(self._rows, dtype=np.int32)[:, None], bitmask), axis=1)
        self._mask_rows(logits, to_device(torch.from_numpy(packed), logits.device))

    def _fill(self, jobs: Sequence[tuple[GrammarMatcher, Sequence[int], frozenset[int]]]) -> Bitmask:
        num_rows = sum(1 + len(draft_ids) for _, draft_ids, _ in jobs)
        bitmask = np.full((num_rows, self._num_words), -1, dtype=np.int32)
        together, first = list[tuple[GrammarMatcher, Rows]](), 0
        self._num_measured -= 1
        for constraint, draft_ids, _ in jobs:
            if constraint.has_mask or (self._num_measured >= 0 and not draft_ids):
                constraint.checked(partial(constraint.fill, bitmask, first), None)
            else:
                together.append((constraint, (constraint.matcher, first, list(draft_ids))))
            first += 1 + len(draft_ids)
        began = time.monotonic()
        try:
            self._fill_rows([rows for _, rows in together], bitmask)
        except BaseException as failure:
            raise_unless_library(failure)
            for constraint, rows in together:
                constraint.checked(partial(self._fill_rows, [rows], bitmask), None)
        if time.monotonic() - began > APART_S:
            self._num_measured = MEASURED_STEPS
        first = 0
        for constraint, draft_ids, stop_ids in jobs:
            _allow_stop_tokens(bitmask[first : first + 1 + len(draft_ids)], constraint.eos_id, stop_ids)
            if not constraint.error and (error := reason(constraint.matcher)):
                constraint.error = f"no token can follow in the grammar: {error}"
            first += 1 + len(draft_ids)
        return bitmask

    def _fill_rows(self, jobs: Sequence[Rows], bitmask: Bitmask) -> None:
        single = [(matcher, row) for matcher, row, draft_ids in jobs if not draft_ids]
        drafted = [job for job in jobs if job[2]]
        if single:
            fill_next_token_bitmask_par(self._executor, single, bitmask)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bitmask)

    def _mask_on_cpu(self, logits: torch.Tensor, bitmask: Bitmask) -> None:
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        is_refused = torch.from_numpy(bits == 0)
        for row, refused in zip(self._rows, is_refused, strict=True):
            logits[row].masked_fill_(refused, float("-inf"))


def mask_rows(logits: torch.Tensor, packed: torch.Tensor) -> None:
    """logits: [S, V], changed in place: tokens whose bit is not set become -inf. packed: [n, 1 + words] int32, the row
    of the logits and its mask, 32 tokens per word.
    """
    shifts = torch.arange(_WORD, device=packed.device, dtype=torch.int32)
    # [n, V]
    is_allowed = ((packed[:, 1:, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    rows = packed[:, 0].long()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(is_allowed == 0, float("-inf")))


def _device_kernel() -> Callable[[torch.Tensor, torch.Tensor], None]:
    try:
        from lorikeet.shard.grammar.triton import mask_rows as kernel
    except ImportError:
        log.warning("grammar_masks_without_triton", effect="each constrained step launches some more kernels")
        return mask_rows
    return kernel


def truncate_drafts(scheduled: Sequence[ScheduledRequest]) -> None:
    """Cut the drafts of a draft model, which are drawn in the step itself, after the first that a grammar refuses. That
    one stays, because the rejection rule draws from the excess of the target's distribution only where it rejects.
    """
    for item in scheduled:
        if item.num_drawn and item.request.constraint.is_constrained:
            item.draft_ids = item.draft_ids[: item.request.constraint.num_allowed(item.draft_ids) + 1]


def _allow_stop_tokens(bitmask: Bitmask, eos_id: int, stop_ids: frozenset[int]) -> None:
    """bitmask: [n, words]. Wherever the grammar may end, any of the request's stop tokens may end it."""
    may_end = (bitmask[:, eos_id // _WORD] >> (eos_id % _WORD)) & 1 == 1
    for stop_id in stop_ids:
        bitmask[may_end, stop_id // _WORD] |= np.int32(np.uint32(1 << (stop_id % _WORD)).view(np.int32))

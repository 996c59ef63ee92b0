"""The rows that kernels of a device sample: their parameters there, and the call. triton.py has the kernels."""

import struct
from dataclasses import dataclass

import torch

from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.drafts.device_drafts import Emitted, Texts
from lorikeet.shard.drafts.lookup_triton import propose
from lorikeet.shard.sampling.penalties import TokenCounts
from lorikeet.shard.sampling.plan import Fused, Row, filters_of
from lorikeet.shard.sampling.report import Sampled
from lorikeet.shard.sampling.scores_triton import FILTERS, RAW, SAMPLES, SHOWN
from lorikeet.shard.sampling.triton import ROOM, WIDTH, Outputs, Parameters, sample_rows

_ALWAYS = 1 << 62
"""Later than any position."""


@dataclass(frozen=True)
class Tile:
    """Sizes of the kernels' work: tokens of a program, and of a row's buffer."""

    width: int = WIDTH
    room: int = ROOM


class DeviceRows:
    """The parameters of each row of device state, for kernels."""

    def __init__(
        self, max_rows: int, device: torch.device, last_tokens: torch.Tensor, counts: TokenCounts, tile: Tile
    ) -> None:
        """last_tokens: [max_rows] newest token of each row."""
        self._device, self._counts, self._tile = device, counts, tile
        self._last_tokens = last_tokens
        # [max_rows, 8] each, see Parameters
        self._numbers = torch.zeros(max_rows, 8, dtype=torch.long, device=device)
        self._numbers[:, 3] = -1
        self._factors = torch.zeros(max_rows, 8, device=device)
        self._changes: dict[int, torch.Tensor] = {}

    def propose(self, texts: Texts, emitted: Emitted, ngrams: range) -> None:
        """Make the next drafts of rows, as device_drafts.propose."""
        propose(texts, emitted, ngrams)

    def warm_up(self, vocab_size: int) -> None:
        """Compile every kernel of sampling: sample row 0, which no request has."""
        zeros, logits = (
            torch.zeros(1, dtype=torch.long, device=self._device),
            torch.zeros(1, vocab_size, device=self._device),
        )
        for updates in (True, False):
            found = Sampled([0], self._device, is_fused=True)
            self.sample(logits, Fused(zeros, zeros.clone(), any_filters=True), zeros.clone(), found, updates)

    def put(self, row: Row) -> None:
        """The request has the row from the next launch on."""
        params = row.params
        entries = [(stop_id, row.num_prompt + params.min_tokens, float("-inf"))
                   for stop_id in params.min_tokens_stop_ids if params.min_tokens]  # fmt: skip
        entries += [(token_id, _ALWAYS, value) for token_id, value in params.logit_bias]
        table = [
            (token_id, until, struct.unpack("<i", struct.pack("<f", value))[0]) for token_id, until, value in entries
        ]
        # [n, 3] token, first position at which it is not changed, bits of what is added
        changes = to_device(torch.tensor(table, dtype=torch.long).view(-1, 3), self._device)
        self._changes[row.row] = changes
        temperature, top_p, log_min_p, typical_p = filters_of(params)
        flags = SAMPLES.value * row.do_sample
        if row.do_sample and (params.top_k > 0 or top_p < 1 or log_min_p > float("-inf") or typical_p < 1):
            flags |= FILTERS.value
        if row.logprobs.wanted:
            flags |= RAW.value if row.logprobs.raw else SHOWN.value
        allowed = 0 if row.allowed is None else row.allowed.data_ptr()
        numbers = [row.seed, params.top_k, flags, row.slot, allowed, changes.data_ptr(), len(table), 0]
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        factors = [temperature, top_p, log_min_p, typical_p, *penalties, 0.0]
        self._numbers[row.row].copy_(to_device(torch.tensor(numbers, dtype=torch.long), self._device))
        self._factors[row.row].copy_(to_device(torch.tensor(factors), self._device))

    def remove(self, row: int) -> None:
        """The row's memory may be used for other tensors once the steps launched so far have ended."""
        del self._changes[row]

    def sample(
        self, logits: torch.Tensor, fused: Fused, positions: torch.Tensor, found: Sampled, updates: bool
    ) -> None:
        """logits: [S, V], positions: [S] of their tokens. Put the tokens of the `fused` rows into `found`; `updates`:
        whether they are the newest tokens of their rows.
        """
        parameters = Parameters(self._numbers, self._factors, self._counts.table, self._last_tokens)
        flags = found.bad.view(torch.uint8), found.overflowed
        outputs = Outputs(found.token_ids, *flags, found.logprobs)
        sample_rows(
            logits, fused.indices, fused.rows, positions, parameters, outputs, fused.any_filters, updates,
            self._tile.width, self._tile.room,
        )  # fmt: skip

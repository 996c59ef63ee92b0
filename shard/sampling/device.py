"""The rows that kernels of a device sample: their parameters there, and the call. triton.py has the kernels."""

import struct
from dataclasses import dataclass

import torch

from lorikeet.shard.batch.padding import MOST_LOGITS, MOST_WANTED
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.sampling.penalties import TokenCounts
from lorikeet.shard.sampling.plan import Fused, Row, filters_of
from lorikeet.shard.sampling.report import Sampled, SlowRows, result_bytes
from lorikeet.shard.sampling.scores_triton import FILTERS, RAW, SAMPLES, SHOWN
from lorikeet.shard.sampling.triton import ROOM, WIDTH, Outputs, Parameters, sample_rows
from lorikeet.shard.speculation.device.device_drafts import Emitted, Texts
from lorikeet.shard.speculation.device.lookup_triton import propose

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
        # [MOST_LOGITS] int64 and [bytes] results, at the same addresses for all captured steps
        self._indices = torch.arange(MOST_LOGITS, device=device)
        self._further_indices = self._indices
        """As many as the largest step that is not captured has needed."""
        self._results = torch.zeros(result_bytes(MOST_WANTED), dtype=torch.uint8, device=device)

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

    def launch(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, kept_logits: torch.Tensor
    ) -> None:
        """Sample as `GraphSampling.launch` does. Raises ValueError for logits of another size than the kept ones."""
        if logits.shape != kept_logits.shape:
            raise ValueError(f"logits {tuple(logits.shape)} of a step that keeps {tuple(kept_logits.shape)}")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        found = self.results(positions.shape[0], positions.shape[0])
        self._launch(logits, self._indices[: rows.shape[0]], rows, positions, found, True, True, kept_logits)

    def token_ids(self, num_rows: int) -> torch.Tensor:
        """The sampled tokens, as in `GraphSampling.token_ids`."""
        return self.results(num_rows, num_rows).token_ids

    def results(self, num_rows: int, num_places: int, slow_rows: SlowRows | None = None) -> Sampled:
        """What the newest captured step has sampled for its first rows; it has the logits of `num_places` rows."""
        return Sampled([0] * num_rows, self._device, True, slow_rows, self._results, num_places)

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
        self._launch(logits, fused.indices, fused.rows, positions, found, fused.any_filters, updates)

    def sample_rows(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, found: Sampled) -> None:
        """Sample a token at each of the S logits, and keep the newest of each row. rows: [S] rows of device state;
        positions: [≥ S].
        """
        num_rows = rows.shape[0]
        if num_rows > self._further_indices.shape[0]:
            self._further_indices = torch.arange(2 * num_rows, device=self._device)
        self._launch(logits, self._further_indices[:num_rows], rows, positions, found, True, True)

    def _launch(
        self, logits: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor,
        found: Sampled, any_filters: bool, updates: bool, kept_logits: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        parameters = Parameters(self._numbers, self._factors, self._counts.address, self._last_tokens)
        outputs = Outputs(found.token_ids, found.bad.view(torch.uint8), found.overflowed, found.logprobs)
        sample_rows(
            logits, indices, rows, positions, *parameters, *outputs, kept_logits, any_filters, updates,
            self._tile.width, self._tile.room,
        )  # fmt: skip

"""The tokens of one step as the model sees them: one flat row of T tokens, cut into segments, one per request.

`StepInputs` is one object for the life of the model: our layers and the attention function hold it, and it is refilled
before each forward.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.proto.params import FIRST_VIRTUAL_ID
from lorikeet.shard.batch.device_tokens import DeviceTokens, GraphSampling, put
from lorikeet.shard.batch.padding import Bounds, Padding
from lorikeet.shard.batch.row_groups import NO_ADAPTERS, AdapterRows, HeadGroups, RowGroups, as_array
from lorikeet.shard.batch.segments import Segment, Segments
from lorikeet.shard.batch.transfer import ALIGNED, DeviceArrays, Upload, to_device
from lorikeet.shard.system import gpu

Indices = npt.NDArray[np.int64]


class Move(NamedTuple):
    """Numbers that change with the accepted drafts of a row of device state."""

    # on the device, changed in place
    numbers: torch.Tensor
    places: Indices
    """[n] which numbers."""
    rows: Indices
    """[n] the row of each."""
    choices: Indices | None = None
    """[n, most + 1] the number by accepted drafts; None where they are added to it."""


class Moves:
    """Changes of a step's numbers by accepted drafts, of one step at a time."""

    def __init__(self) -> None:
        self._moves: list[Move] = []

    def clear(self) -> None:
        """Begin a step."""
        self._moves = []

    def add(self, move: Move) -> None:
        """Move these numbers too."""
        self._moves.append(move)

    def apply(self, num_accepted: torch.Tensor | None) -> None:
        """Change all numbers, in order with the next launches. num_accepted: [rows of device state] int64."""
        if not self._moves:
            return
        assert num_accepted is not None
        tables = [_table(move) for move in self._moves]
        sizes = [len(table) * len(table[0]) for table in tables]
        packed = np.concatenate([column for table in tables for column in table], dtype=np.int64)
        sent = to_device(torch.from_numpy(packed), num_accepted.device).split(sizes)
        apply = _move_by_launch if gpu.has_triton(num_accepted.device) else move_by_operators
        for move, flat in zip(self._moves, sent, strict=True):
            apply(move, flat, num_accepted)

    def warm_up(self, num_accepted: torch.Tensor) -> None:
        """Compile the kernels of `apply`."""
        none = np.zeros(1, np.int64)
        for dtype, choices in ((torch.long, None), (torch.int32, None), (torch.long, none[None])):
            self.add(Move(torch.zeros(1, dtype=dtype, device=num_accepted.device), none, none, choices))
        self.apply(num_accepted)
        self.clear()


def _move_by_launch(move: Move, table: torch.Tensor, num_accepted: torch.Tensor) -> None:
    from lorikeet.shard.batch import device_tokens_triton

    device_tokens_triton.move(move.numbers, table, num_accepted, len(move.places), move.choices is not None)


def move_by_operators(move: Move, table: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Change the numbers of one move, by operators of PyTorch. table: what `_table` gives, on the device and flat."""
    places, rows, *choices = table.view(-1, len(move.places))
    accepted = num_accepted.index_select(0, rows)
    if choices:
        chosen = table.view(-1, len(move.places))[2:].gather(0, accepted[None])[0]
        move.numbers.index_copy_(0, places, chosen.to(move.numbers.dtype))
    else:
        move.numbers.index_add_(0, places, accepted.to(move.numbers.dtype))


def _table(move: Move) -> list[Indices]:
    """[2 + choices][n] places, rows and choices."""
    return [move.places, move.rows, *(() if move.choices is None else move.choices.T)]


class HeadsRow(NamedTuple):
    """Draft tokens that Medusa heads propose from one of the rows whose logits are wanted."""

    row: int
    """Index into `logits_rows`."""
    slot: int
    """Slot of the adapter with the heads."""
    num_drafts: int
    """Heads 1 … num_drafts propose one token each, head j the one j positions after the row's own."""


HeadsRows = npt.NDArray[np.int32]
"""[n, 3] several `HeadsRow`."""
NO_HEADS: HeadsRows = np.empty((0, 3), np.int32)
MOST_ARRAYS = 32
"""Arrays of a padded step, those of the attention backend included."""
Positions = npt.NDArray[np.int64]


class StepInputs:
    """What a forward pass reads apart from weights and KV. Each step calls `fill`, then the attention backend's
    `prepare`, then `send`.
    """

    def __init__(self, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self._set_columns(Segments.of((), page_size))
        # [rows of device state] int64: drafts that the step before accepted; None where the host always knows them
        self.num_accepted: torch.Tensor | None = None
        self.adds_on_device = device.type != "cpu"
        """Whether the device adds them to positions. On CPU the host reads them without waiting."""
        # [T] token ids
        self.input_ids = torch.empty(0, dtype=torch.long, device=device)
        # [T] absolute position of each token in its request
        self.position_ids = torch.empty(0, dtype=torch.long, device=device)
        # [T] where each token's K and V go: page id * P + offset in page
        self.kv_slots = torch.empty(0, dtype=torch.long, device=device)
        # [T] int32 where the device has a token that the host does not know, -1 for others
        self.token_places = torch.empty(0, dtype=torch.int32, device=device)
        # [S] indices into T whose logits are wanted
        self.logits_rows = torch.empty(0, dtype=torch.long, device=device)
        # [S] position of the token that follows each of these; empty where only the device knows the indices
        self.next_positions = torch.empty(0, dtype=torch.long, device=device)
        # [S + E] of a padded step: rows of device state that it samples for, -1 for logits that it only computes
        self.sampled_rows = torch.empty(0, dtype=torch.long, device=device)
        self.heads = NO_HEADS
        """Rows of heads' draft tokens follow the S rows whose logits are wanted, in this order: E in all."""
        self.adapter_rows = NO_ADAPTERS
        """Adapter rows of the T tokens."""
        self.head_adapter_rows = NO_ADAPTERS
        """Adapter rows of the S wanted rows and the E rows of draft tokens, which use the same output head."""
        self.norm_slots: set[int] = set()
        """Slots of adapters that change norms after they are computed. Steps with them are not padded."""
        # slot, rows of the step and places among the adapter's of virtual tokens, on the device
        self.virtual_rows: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.num_wanted = self.num_drafts = 0
        """S and E."""
        self.bounds: Bounds | None = None
        """What the step is padded to; None without padding."""
        self._host_rows: Sequence[int] | Indices | None = None
        self.head_groups: HeadGroups | None = None
        """The wanted draft tokens of heads on the device, where kernels read them there."""
        self.upload = Upload(device)
        """Takes the arrays of the step to the device."""
        self.num_attention_numbers: Callable[[Bounds], int] = lambda bounds: 0
        """Most int32 numbers that the attention backend adds to a padded step."""
        # [N] int64 from which captured steps take the tokens that the host does not know; or None
        self.device_tokens: torch.Tensor | None = None
        self.graph_sampling: GraphSampling | None = None
        """What captured steps sample by, if they do."""
        self._groups: tuple[RowGroups, RowGroups] | None = None
        self._padding: Padding | None = None
        self._arrays: dict[Bounds, DeviceArrays] = {}
        self._on_device: DeviceTokens | None = None
        self._sampled_rows: Sequence[int] = ()
        self._moves = Moves()
        # of a padded step: destination and source, on the device
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reserve_groups(self, max_rows: int, max_slots: int, max_drafts: int = 0, num_sums: int = 0) -> None:
        """From now on describe to the device too which rows belong to which adapter, and which draft tokens to which
        head, in steps of up to `max_rows` rows, and `max_drafts` draft tokens with them at the output head. The last
        `num_sums` slots are sums of adapters.
        """
        of_rows, of_head = (RowGroups(count, max_slots, num_sums) for count in (max_rows, max_rows + max_drafts))
        self._groups = of_rows, of_head
        self.head_groups = HeadGroups(max_drafts)

    def pad(self, padding: Padding | None) -> None:
        """From now on pad the steps that fit, and keep what the device reads of them at addresses of their bounds."""
        self._padding = padding
        self._arrays = {}

    def fill(
        self,
        segments: Sequence[Segment],
        input_ids: torch.Tensor,
        logits_rows: torch.Tensor,
        host_rows: Sequence[int] | Indices | None = None,
        heads: Sequence[HeadsRow] | HeadsRows = (),
        on_device: DeviceTokens | None = None,
        sampled_rows: Sequence[int] = (),
    ) -> None:
        """Describe the next step. input_ids: [T]; logits_rows: [S] indices into T. Each is on the host or the device;
        `host_rows` repeats indices on the device for the host. heads: draft tokens that are wanted too; on_device:
        tokens that only the device knows; sampled_rows: rows of device state of the first of the S, whose tokens a
        captured step may sample.
        """
        self.heads = as_array(heads)
        self.num_wanted = logits_rows.shape[0]
        self.num_drafts = int(self.heads[:, 2].sum()) if len(self.heads) else 0
        if not isinstance(segments, Segments):
            segments = Segments.of(segments, self.page_size)
        if not self.adds_on_device and self.num_accepted is not None:
            segments = segments.settled(self.num_accepted.numpy())
        self._host_rows = host_rows
        if host_rows is None and _is_on_host(logits_rows):
            self._host_rows = logits_rows.tolist()
        self.bounds, self._on_device = None, on_device
        input_ids = self._take_virtual(segments, input_ids)
        self._moves.clear()
        changes_norms = bool(self.norm_slots) and not self.norm_slots.isdisjoint(segments.slots.tolist())
        is_plain = not (self.virtual_rows or changes_norms)
        if self._padding is not None and is_plain:
            num_rows, has_adapters = input_ids.shape[0], bool(np.count_nonzero(segments.slots >= 0))
            has_sums = self._groups is not None and bool((segments.slots >= self.first_sum).any())
            self.bounds = self._padding.fit(num_rows, self.num_wanted, self.num_drafts, has_adapters, has_sums)
            if self.bounds is not None:
                spare = self._spare(self.bounds.num_rows - num_rows, self._padding.spare_page)
                segments = segments.then(Segments.of(spare, self.page_size))
        self._set_columns(segments)
        self._sampled_rows = () if self.bounds is None or self.graph_sampling is None else sampled_rows
        self.upload.begin(None if self.bounds is None else self._arrays_of(self.bounds))
        positions, kv_slots = self._lay_out()
        self._fill_rows(input_ids, logits_rows, positions, kv_slots)
        self._fill_adapters(positions)
        if self.head_groups is not None and self.num_draft_rows:
            num_padded = None if self.bounds is None else self.bounds.num_drafts
            self.head_groups.fill(self.heads, self.upload, num_padded)

    def send(self) -> None:
        """Start to copy a padded step to the device, after `fill` and the attention backend's `prepare`."""
        self.upload.send()
        for destination, source in self._copies:
            destination.copy_(source)
        if self.bounds is not None and self._on_device is not None and self.device_tokens is None:
            put(self.input_ids, self.token_places, self._on_device.tokens)
        self._moves.apply(self.num_accepted)

    def accept_on_device(self, num_accepted: torch.Tensor) -> None:
        """From now on the device may accept drafts before the host knows: [rows of device state] int64 how many."""
        self.num_accepted = num_accepted
        if self.adds_on_device:
            self._moves.warm_up(num_accepted)

    def move(self, numbers: torch.Tensor, places: Positions, segments: Positions) -> None:
        """Let `send` add the drafts that were accepted before uncertain segments to numbers[places]. segments: [n]."""
        self._moves.add(Move(numbers, places, self.device_rows[segments].astype(np.int64)))

    def put_device_tokens(self) -> None:
        """Put the tokens that only the device knows into `input_ids`: part of a captured step. Others have them."""
        if self.bounds is not None and self.device_tokens is not None:
            put(self.input_ids, self.token_places, self.device_tokens)

    def _take_virtual(self, segments: Segments, input_ids: torch.Tensor) -> torch.Tensor:
        """Find the rows of virtual tokens, whose step is not padded: embeddings, keys and values of the adapters are
        copied into them, by launches that no captured step has. input_ids: [T]. Returns the ids with 0 in their place.
        """
        self.virtual_rows = []
        if not _is_on_host(input_ids) or not len(input_ids) or int(input_ids.numpy().max()) < FIRST_VIRTUAL_ID:
            return input_ids
        ids = input_ids.numpy()
        rows = np.flatnonzero(ids >= FIRST_VIRTUAL_ID)
        owners = np.repeat(np.arange(len(segments)), segments.counts)[rows]
        for owner in np.unique(owners):
            own = rows[owners == owner]
            both = (torch.from_numpy(each) for each in (own, ids[own] - FIRST_VIRTUAL_ID))
            at, places = (to_device(each, self.device) for each in both)
            self.virtual_rows.append((int(segments.slots[owner]), at, places))
        return torch.from_numpy(np.where(ids < FIRST_VIRTUAL_ID, ids, 0))

    def _fill_rows(
        self, input_ids: torch.Tensor, logits_rows: torch.Tensor, positions: Positions, kv_slots: Positions
    ) -> None:
        """positions, kv_slots: [T] of the bounds."""
        num_rows, num_wanted = len(positions), self.num_wanted if self.bounds is None else self.bounds.num_wanted
        ids, rows = _on_host(input_ids, num_rows), np.zeros(num_wanted, np.int64)
        if self._host_rows is not None:
            rows[: self.num_wanted] = self._host_rows
        token_places = np.full(num_rows, -1, np.int32)
        if self._on_device is not None:
            token_places[self._on_device.indices] = self._on_device.places
        sampled_rows = np.full(0 if self.bounds is None else self.bounds.num_logits, -1, np.int64)
        sampled_rows[: len(self._sampled_rows)] = self._sampled_rows
        arrays = ids, rows, positions, kv_slots, positions[rows] + 1, token_places, sampled_rows
        self.input_ids, self.logits_rows, self.position_ids, self.kv_slots, *others = self.upload.add(*arrays)
        self.next_positions, self.token_places, self.sampled_rows = others
        if self._host_rows is None:
            self.next_positions = self.next_positions[:0]
        if np.count_nonzero(self.num_uncertain):
            self._move_segments(positions, rows)
        self._copies = []
        if self.bounds is not None:
            pairs = (self.input_ids, input_ids), (self.logits_rows, logits_rows)
            self._copies = [(to[: len(given)], given) for to, given in pairs if not _is_on_host(given)]
            return
        if not _is_on_host(input_ids):
            self.input_ids = input_ids
        if not _is_on_host(logits_rows):
            self.logits_rows = logits_rows
        if self._on_device is not None:
            put(self.input_ids, self.token_places, self._on_device.tokens)

    def _move_segments(self, positions: Positions, wanted: Positions) -> None:
        """positions: [T] before any draft is accepted; wanted: [S] indices into T."""
        owners = np.repeat(np.arange(len(self.counts)), self.counts)
        tokens = np.flatnonzero(self.num_uncertain[owners])
        self.move(self.position_ids, tokens, owners[tokens])
        if self._host_rows is not None:
            rows = np.flatnonzero(self.num_uncertain[owners[wanted]])
            self.move(self.next_positions, rows, owners[wanted][rows])
        owners = owners[tokens]
        steps = np.minimum(np.arange(self.num_uncertain.max() + 1), self.num_uncertain[owners][:, None])
        slots = self._slots(owners[:, None], positions[tokens][:, None] + steps)
        self._moves.add(Move(self.kv_slots, tokens, self.device_rows[owners].astype(np.int64), slots))

    def _arrays_of(self, bounds: Bounds) -> DeviceArrays:
        """The memory for steps of these bounds."""
        found = self._arrays.get(bounds)
        if found is None:
            # ids, positions and KV slots in eight bytes, rows of tokens; wanted rows, what follows and who samples them
            num_numbers = 7 * bounds.num_rows + 4 * bounds.num_wanted + 2 * bounds.num_logits
            num_numbers += self.num_attention_numbers(bounds)
            if self._groups is not None and self.head_groups is not None:
                of_rows, of_head = self._groups
                num_numbers += of_rows.num_numbers(bounds.num_rows) + of_head.num_numbers(bounds.num_logits)
                num_numbers += self.head_groups.num_numbers(bounds.num_drafts)
            num_bytes = num_numbers * torch.int32.itemsize + MOST_ARRAYS * ALIGNED
            with torch.inference_mode(False):  # tensors that may be changed outside too
                found = DeviceArrays(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))
            self._arrays[bounds] = found
        return found

    def _set_columns(self, segments: Segments) -> None:
        """Take the segments of a step, padding included."""
        self.segments = segments
        # For attention backends, [R] each: first position, number of tokens, first row in T
        self.starts, self.counts = segments.starts, segments.counts
        self.first_rows = (np.cumsum(self.counts) - self.counts).astype(np.int32)
        # [R] `num_uncertain` and `device_row` of each segment
        self.num_uncertain, self.device_rows = segments.num_uncertain, segments.device_rows
        # [R, most pages of a segment] page ids; a segment with fewer has any page after its own
        self.page_table = segments.page_table
        # [T] segment of each token
        self._owners: Positions = np.repeat(np.arange(len(segments)), self.counts)

    def _lay_out(self) -> tuple[Positions, Positions]:
        """Returns [T] each token's position, and [T] where its K and V go."""
        owners = self._owners
        positions = np.arange(owners.size) + (self.starts - self.first_rows).astype(np.int64)[owners]
        return positions, self._slots(owners, positions)

    def _slots(self, owners: Positions, positions: Positions) -> Positions:
        """Where the K and V of these positions of these segments go, in the same shape."""
        pages = self.page_table[owners, positions // self.page_size].astype(np.int64)
        slots: Positions = pages * self.page_size + positions % self.page_size
        return slots

    def token_types(self) -> torch.Tensor | None:
        """[T] 1 for tokens of the second text of a pair, else 0; None where there are none."""
        second_texts = self.segments.second_texts
        if not np.count_nonzero(second_texts):
            return None
        positions = np.arange(self._owners.size) - self.first_rows[self._owners] + self.starts[self._owners]
        limits = second_texts[self._owners]
        types = ((limits > 0) & (positions >= limits)).astype(np.int64)
        return to_device(torch.from_numpy(types), self.device)

    def _spare(self, num_rows: int, page_id: int) -> list[Segment]:
        """Rows of no request, in a page of no request."""
        counts = [min(self.page_size, num_rows - first) for first in range(0, num_rows, self.page_size)]
        return [Segment(0, count, (page_id,)) for count in counts]

    @property
    def host_rows(self) -> Sequence[int] | Indices:
        """[S] `logits_rows` on the host; waits for the device where they were not given."""
        return self.logits_rows.tolist() if self._host_rows is None else self._host_rows

    @property
    def is_sampled(self) -> bool:
        """Whether the step samples its `sampled_rows` itself. Their logits are undefined then."""
        return bool(self._sampled_rows)

    @property
    def num_draft_rows(self) -> int:
        """Rows of heads' draft tokens that a forward pass gives: E, or more of a padded step."""
        return self.num_drafts if self.bounds is None else self.bounds.num_drafts

    @property
    def first_sum(self) -> int:
        """The first slot of a sum of adapters, where kernels of a device read the rows of each."""
        assert self._groups is not None
        return self._groups[0].first_sum

    @property
    def changes_norms(self) -> bool:
        """Whether an adapter of the step changes norms."""
        if not self.norm_slots:
            return False
        return not self.norm_slots.isdisjoint(self.adapter_rows.tasks[:, 0].tolist())

    @property
    def num_logits(self) -> int:
        """Wanted rows of a forward pass: S + E."""
        return self.num_wanted + self.num_drafts

    def _fill_adapters(self, positions: Positions) -> None:
        """positions: [T]."""
        self.adapter_rows = self.head_adapter_rows = NO_ADAPTERS
        segments, bounds, owners = self.segments, self.bounds, self._owners
        if not np.count_nonzero(segments.slots >= 0) and not (bounds is not None and bounds.has_adapters):
            return
        # [T] slot of each token: an adapter may apply to the last ones of a segment only
        row_slots = np.where(positions < segments.slot_starts[owners], -1, segments.slots[owners]).astype(np.int32)
        wanted = row_slots[np.asarray(self.host_rows, np.int64)]
        # [S] -1 for rows that are padding
        head_slots = np.full(self.logits_rows.shape[0], -1, np.int32)
        head_slots[: len(wanted)] = wanted
        if len(self.heads):
            head_slots = np.concatenate([head_slots, head_slots[np.repeat(self.heads[:, 0], self.heads[:, 2])]])
        self.adapter_rows, self.head_adapter_rows = AdapterRows(row_slots, owners), AdapterRows(head_slots)
        if self._groups is not None:
            self.adapter_rows.groups, self.head_adapter_rows.groups = self._groups
            num_rows, num_logits = (None, None) if bounds is None else (bounds.num_rows, bounds.num_logits)
            may_have_sums = bounds is not None and bounds.has_sums
            self._groups[0].fill(row_slots, self.upload, num_rows, may_have_sums)
            self._groups[1].fill(head_slots, self.upload, num_logits, may_have_sums)


def _is_on_host(values: torch.Tensor) -> bool:
    return values.device.type == "cpu"


def _on_host(ids: torch.Tensor, length: int) -> Positions:
    """ids: [≤ length]. Returns [length] with zeros behind them; all zeros for those that the host does not know."""
    found = np.zeros(length, np.int64)
    if _is_on_host(ids):
        found[: ids.shape[0]] = ids.numpy()
    return found


class Network(Protocol):
    """What the step loop needs of a model: fill `inputs`, call `forward`. `Model` implements it: its folder imports
    that of the scheduler, which imports that of drafts, where a draft model is one.
    """

    inputs: StepInputs

    def forward(self) -> torch.Tensor:
        """Logits of `inputs.logits_rows`: [S, V] float32."""
        ...

    def forward_with_hidden(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and [S, H] bfloat16 that the output head computes them of."""
        ...


class RankDesync(RuntimeError):
    """A step failed on one of several ranks: they are no longer in step and can compute nothing together any more."""

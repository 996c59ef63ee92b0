"""A draft model with a chosen acceptance probability: it runs its real forward pass, then its logits are replaced.

The outputs of the target are recorded first. At each position of a recorded text the draft proposes the recorded token
with probability α, drawn once per text and position from a fixed seed, and any other token else. Everything but α is
the engine's own: planning, the draft model's passes and KV, verification, counts. The engine has no branch for this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from lorikeet.shard.batch.inputs import StepInputs
from lorikeet.shard.batch.transfer import to_device
from lorikeet.shard.model import Model
from lorikeet.shard.requests.request import Request

SEED = 20_260_711
"""Seed of the accepted positions; fixed before anything was measured."""
FORCED = 1e9
"""A logit that no other reaches."""
ForcedText = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""A recorded text, and which of its positions are accepted."""
NO_TEXT: ForcedText = np.empty(0, np.int64), np.empty(0, np.bool_)


@dataclass
class ForcedAcceptance:
    """Which positions of the recorded texts are accepted."""

    chance: float
    recorded: Sequence[Sequence[int]]
    """By number of text, prompt and output."""
    round: int = 0
    """Each round has other positions."""
    _live: list[tuple[Request, npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = field(default_factory=list)

    def began(self, number: int, request: Request) -> None:
        """`request` generates recorded text `number`, modulo their count."""
        ids = np.asarray(self.recorded[number % len(self.recorded)], np.int64)
        self._live.append((request, ids, self.right(number, len(ids))))

    def right(self, number: int, length: int) -> npt.NDArray[np.bool_]:
        """The positions of text `number` that are accepted."""
        draw: npt.NDArray[np.float64] = np.random.default_rng([SEED, self.round, number]).random(length)
        return draw < self.chance

    def set(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        """logits: [S, V], of the first S segments of a pass of the draft model; changed in place."""
        by_page = self._by_page()
        forced: list[tuple[int, int]] = []
        forbidden: list[tuple[int, int]] = []
        for row, (page, following) in enumerate(_ends(inputs)[: logits.shape[0]]):
            ids, right = by_page.get(page, NO_TEXT)
            if following < len(ids):
                (forced if right[following] else forbidden).append((row, int(ids[following])))
        _put(logits, forced, FORCED)
        _put(logits, forbidden, -torch.inf)

    def force(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        """Make the target generate the recorded texts. logits: [S + E, V], of one of its passes; changed in place."""
        by_page, ends = self._by_page(), _ends(inputs)
        forced: list[tuple[int, int]] = []
        for row, host_row in enumerate(inputs.host_rows):
            place = int(inputs.first_rows.searchsorted(host_row, side="right")) - 1
            ids, _ = by_page.get(ends[place][0], NO_TEXT)
            following = int(inputs.starts[place]) + int(host_row) - int(inputs.first_rows[place]) + 1
            if following < len(ids):
                forced.append((row, int(ids[following])))
        _put(logits, forced, FORCED)

    def _by_page(self) -> dict[int, ForcedText]:
        """Recorded texts and accepted positions, by page of the requests that generate them."""
        self._live = [entry for entry in self._live if not entry[0].finish_reason]
        by_page: dict[int, ForcedText] = {}
        for request, ids, right in self._live:
            by_page.update(dict.fromkeys(request.page_ids, (ids, right)))
        return by_page


def _ends(inputs: StepInputs) -> list[tuple[int, int]]:
    """Of each segment, the page of its last token, which no other request has, and the position that follows."""
    following = inputs.starts + inputs.counts
    pages = inputs.page_table[np.arange(len(following)), (following - 1) // inputs.page_size]
    return list(zip(pages.tolist(), following.tolist(), strict=True))


def _put(logits: torch.Tensor, places: Sequence[tuple[int, int]], value: float) -> None:
    """logits: [rows, V]; places: (row, token). The host does not wait for the device."""
    if places:
        rows, tokens = to_device(torch.tensor(places).T.contiguous(), logits.device)
        logits.index_put_((rows, tokens), to_device(torch.tensor(value), logits.device))


class ForcedModel(Model):
    """A loaded model whose logits are replaced."""

    forced: ForcedAcceptance | None = None
    is_target: bool = False
    """Whether it generates the recorded texts, or proposes them as a draft."""

    @classmethod
    def of(cls, model: Model, is_target: bool = False) -> Self:
        forced_model = object.__new__(cls)
        forced_model.__dict__.update(model.__dict__)
        forced_model.is_target = is_target
        return forced_model

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:
        """[S, V]"""
        logits = super().forward()
        if self.forced is not None:
            (self.forced.force if self.is_target else self.forced.set)(self.inputs, logits)
        return logits

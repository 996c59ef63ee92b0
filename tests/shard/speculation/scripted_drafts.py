"""A draft source that is given the text and errs now and then, so that every number of accepted drafts occurs."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lorikeet.shard.requests.request import Request
from lorikeet.shard.speculation.device import device_drafts
from lorikeet.shard.speculation.device.device_drafts import Emitted, Texts
from lorikeet.shard.speculation.drafter import Drafter, DraftSettings
from lorikeet.shard.speculation.lookup import Lookup, LookupDrafter
from tests.shard.fake_model import VOCAB_SIZE
from tests.shard.rig import Rig

FEWER_EVERY = 11
"""At two of so many lengths the device may find one draft and none, where the host expects more."""


class ScriptedText(Lookup):
    """Proposes each token of a text with the given probability, by a hash of its position alone, else another one."""

    def __init__(self, text: Sequence[int], num_known: int, chance: float) -> None:
        self._text = text
        self._num_known = num_known
        self._chance = chance
        self.match_length = 99

    def extend(self, token_ids: Sequence[int]) -> None:
        self._num_known += len(token_ids)

    def propose(self, num_tokens: int) -> list[int]:
        first = self._num_known
        return [self._token(position) for position in range(first, min(first + num_tokens, len(self._text) + 3))]

    def _token(self, position: int) -> int:
        choice = random.Random(position * 7919)
        if position < len(self._text) and choice.random() < self._chance:
            return self._text[position]
        return choice.randrange(VOCAB_SIZE)


def script_device(rig: Rig, texts: Mapping[int, Sequence[int]], chance: float, finds_fewer: bool = False) -> None:
    """Let the device propose the same tokens, by the number of tokens that it knows itself; with `finds_fewer` one,
    or none, at some lengths.
    """

    def propose(known: Texts, emitted: Emitted, ngrams: range) -> None:
        device_drafts.propose(known, emitted, ngrams)
        requests = {request.row: request for request in [*rig.scheduler.running, *rig.scheduler._ending]}
        emitted.report[:, device_drafts.MOST_DRAFTS] = 99
        for row in emitted.table[0].tolist():
            text, length = texts[requests[row].key[1]], int(known.lengths[row])
            assert known.token_ids[row, : min(length, len(text))].tolist() == list(text[:length])
            num_found = device_drafts.MOST_DRAFTS
            if finds_fewer and length % FEWER_EVERY < 2:
                num_found = length % FEWER_EVERY
            ids = ScriptedText(text, length, chance).propose(num_found)
            known.draft_ids[0, row].fill_(device_drafts.NO_TOKEN)
            known.draft_ids[0, row, : len(ids)] = torch.tensor(ids, dtype=torch.long)

    rig.sampler.device_drafts._propose = propose


class ScriptedDrafter(LookupDrafter):
    """Takes the place of prompt lookup."""

    def index(self, request: Request) -> ScriptedText:
        settings = self._settings
        assert isinstance(settings, ScriptedDrafts)
        return ScriptedText(settings.texts[request.key[1]], len(request.token_ids), settings.chance)


@dataclass(frozen=True)
class ScriptedDrafts(DraftSettings):
    """For requests whose whole texts are known, by the request's id."""

    texts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    chance: float = 0.8
    further: tuple[type[Drafter], ...] = (ScriptedDrafter,)

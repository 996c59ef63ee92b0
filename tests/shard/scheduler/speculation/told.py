"""A guesser that was told the text and errs now and then, so that every depth of acceptance occurs."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lorikeet.shard.scheduler.request import Request, Source
from lorikeet.shard.scheduler.speculation import DraftSources
from tests.shard.fake_model import VOCAB_SIZE


class Told:
    """DraftTokens each token rightly with the given chance, by a hash of its position alone."""

    source = Source.LOOKUP
    match_length = 99

    def __init__(self, text: Sequence[int], num_known: int, chance: float) -> None:
        self._text = text
        self._num_known = num_known
        self._chance = chance

    def extend(self, token_ids: Sequence[int]) -> None:
        self._num_known += len(token_ids)

    def draft_token(self, num_tokens: int) -> list[int]:
        first = self._num_known
        return [self._one(place) for place in range(first, min(first + num_tokens, len(self._text) + 3))]

    def _one(self, place: int) -> int:
        choice = random.Random(place * 7919)
        if place < len(self._text) and choice.random() < self._chance:
            return self._text[place]
        return choice.randrange(VOCAB_SIZE)


@dataclass(frozen=True)
class RecordingDraftSources(DraftSources):
    """Of requests whose whole texts are known, by the request's id."""

    texts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    chance: float = 0.8

    def make(self, request: Request) -> Told:
        return Told(self.texts[request.key[1]], len(request.token_ids), self.chance)

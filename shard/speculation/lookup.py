"""Prompt lookup: proposes what followed the most recent occurrence of the newest tokens in the request's own text.

The match is the longest suffix of the known tokens that occurred before, of at most `longest` tokens. One table per
length maps the hash of that many tokens to where they last ended; a known token costs one entry in each. Saxena 2023,
"Prompt lookup decoding"; LoRAX's variant takes the first occurrence of the last token alone.

The index is compiled (lookup.c), or in Python where a machine has no compiler.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure, addressof, byref, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import structlog

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import Method
from lorikeet.shard.requests.request import Request, ScheduledRequest
from lorikeet.shard.speculation.drafter import Drafter, DraftSettings, Offer, Pages, kind_of
from lorikeet.shard.speculation.states import NO_STATE, DraftKind
from lorikeet.shard.system.native import CompilerMissing, library

log = structlog.get_logger()

_BASE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def reads_texts(request: Request) -> bool:
    """Whether the request takes draft tokens from texts: its own, or earlier outputs."""
    params = request.speculation
    return params.num_tokens > 0 and params.method in (Method.LOOKUP, Method.AUTO)


class LookupDrafter(Drafter):
    """One index for each request, made at the first step that could use it. Where the device makes the drafts, it tells
    whether there are any.
    """

    value = pb.SOURCE_LOOKUP

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._indices: dict[Request, Index] = {}

    @classmethod
    def make(cls, settings: DraftSettings, pages: Pages) -> Self | None:
        return cls(settings)

    def takes(self, request: Request) -> bool:
        return reads_texts(request)

    def propose(self, request: Request, room: int) -> Offer | None:
        num_tokens = min(request.speculation.num_tokens, room)
        if num_tokens <= 0:
            return None
        if request.drafts_on_device:
            length, is_long = request.match_length, request.match_length >= self._settings.ngram_long
            draft_ids = [0] * num_tokens
            return Offer(request, self.value, num_tokens, draft_ids, NO_STATE, is_long, length) if length else None
        index = self.index_of(request)
        draft_ids, length = index.propose(num_tokens), index.match_length
        is_long = length >= self._settings.ngram_long
        return Offer(request, self.value, len(draft_ids), draft_ids, NO_STATE, is_long, length) if draft_ids else None

    def kinds(self, request: Request) -> Iterable[DraftKind]:
        index = self._indices.get(request)
        length = request.match_length if index is None else index.match_length
        return [kind_of(request, self.value, length >= self._settings.ngram_long)] if length else []

    def drafts_on_device(self, request: Request) -> bool:
        return not (request.speculation.prediction_ids or request.learner)

    def committed(self, item: ScheduledRequest, token_ids: Sequence[int], head_ids: Sequence[int]) -> None:
        if (index := self._indices.get(item.request)) is not None:
            index.extend(token_ids)

    def pause(self, request: Request) -> None:
        self._indices.pop(request, None)

    def release(self, request: Request) -> None:
        self._indices.pop(request, None)
        request.match_length = 1

    def index_of(self, request: Request) -> "Index":
        """The index of the request's tokens."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = self.index(request)
        return index

    def index(self, request: Request) -> "Index":
        """A new index of the request's tokens so far."""
        settings, params = self._settings, request.speculation
        made = CompiledLookup if is_compiled() else Lookup
        return made(request.token_ids, settings.ngram_min, settings.ngram_max, params.prediction_ids)


class Lookup:
    """The index of one request's text."""

    def __init__(
        self, token_ids: Sequence[int], shortest: int = 1, longest: int = 8, before: Sequence[int] = ()
    ) -> None:
        """`before` is another text to search, such as one that the output may repeat."""
        self._lengths = range(shortest, longest + 1)
        self._tables: list[dict[int, int]] = [{} for _ in self._lengths]
        self._tokens: list[int] = []
        self._match_end = -1
        """Where the continuation of the longest match begins, -1 without a match."""
        self.match_length = 0
        """Tokens of the longest match."""
        if before:
            self._load(before)
        self._start = len(self._tokens)
        """No match crosses the border between the two texts."""
        self._load(token_ids[:-1])
        self.extend(token_ids[-1:])

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._tokens.append(token_id)
            self._match_end, self.match_length = -1, 0
            end, value, weight = len(self._tokens), 0, 1
            deepest = min(self._lengths[-1], end - self._start)
            for length in range(1, deepest + 1):
                value = (value + (self._tokens[end - length] + 1) * weight) & _MASK
                weight = weight * _BASE & _MASK
                if length < self._lengths[0]:
                    continue
                table = self._tables[length - self._lengths[0]]
                found = table.get(value, -1)
                if found >= 0 and self._tokens[found - length : found] == self._tokens[end - length : end]:
                    self._match_end, self.match_length = found, length
                table[value] = end

    def propose(self, num_tokens: int) -> list[int]:
        first = self._match_end
        if first < 0:
            return []
        if first <= self._start:  # a proposal from the other text stops where that ends
            return self._tokens[first : min(first + num_tokens, self._start)]
        followed = self._tokens[first : first + num_tokens]
        while len(followed) < num_tokens:  # the match reaches the newest token: the repetition goes on
            followed += followed[: num_tokens - len(followed)]
        return followed

    def _load(self, token_ids: Sequence[int]) -> None:
        """Index a whole text at once: as `extend` does, without looking for matches."""
        first = len(self._tokens)
        self._tokens += token_ids
        tokens: npt.NDArray[np.uint64] = np.asarray(token_ids, np.uint64) + np.uint64(1)
        hashes = np.zeros(len(tokens), np.uint64)
        weight = 1
        for length in range(1, min(self._lengths[-1], len(tokens)) + 1):
            # hashes[i] is that of the tokens i - length + 1 … i; before it, of those i - length + 2 … i
            hashes[length - 1 :] += tokens[: len(tokens) - length + 1] * np.uint64(weight)
            weight = weight * _BASE & _MASK
            if length >= self._lengths[0]:
                ends = range(first + length, first + len(tokens) + 1)
                self._tables[length - self._lengths[0]].update(zip(hashes[length - 1 :].tolist(), ends, strict=True))


SOURCE = Path(__file__).with_name("lookup.c")
FIRST_CAPACITY = 256
"""Tokens that a new index has room for; a full one gets twice as much."""


class _Text(Structure):
    """`Text` of lookup.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "tables")),
        *((name, c_int64) for name in ("num_entries", "num_tokens", "start", "shortest", "longest")),
        *((name, c_int64) for name in ("match_end", "match_length")),
        ("factor", c_uint64),
    ]


class _Functions(NamedTuple):
    """Those of lookup.c."""

    extend: Callable[..., None]
    propose: Callable[..., int]
    follow: Callable[..., None]


@cache
def functions() -> _Functions:
    """Raises CompilerMissing."""
    own = library(SOURCE)
    extend, propose, follow = own.lookup_extend, own.lookup_propose, own.lookup_follow
    extend.restype, propose.restype, follow.restype = None, c_int64, None
    extend.argtypes, propose.argtypes = (c_void_p, c_int64), (c_void_p, c_int64, c_void_p)
    follow.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
    return _Functions(extend, propose, follow)


@cache
def is_compiled() -> bool:
    """Whether this machine can compile the index, or has it compiled in advance; logs once why not."""
    try:
        functions()
    except CompilerMissing as reason:
        log.warning("lookup_not_compiled", reason=str(reason))
        return False
    return True


class CompiledLookup:
    """As `Lookup`, by lookup.c."""

    def __init__(
        self, token_ids: Sequence[int], shortest: int = 1, longest: int = 8, before: Sequence[int] = ()
    ) -> None:
        """`before` is another text to search. Raises CompilerMissing."""
        self._extend, self._propose, _ = functions()
        self._text = _Text(
            start=len(before), shortest=shortest, longest=longest, match_end=-1, factor=secrets.randbits(64) | 1
        )
        self._reference = byref(self._text)
        self.address = addressof(self._text)
        """Of the `Text`, for `lookup_follow`."""
        # [capacity]
        self._tokens: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.extend([*before, *token_ids])

    @property
    def match_length(self) -> int:
        """Tokens of the longest match."""
        return self._text.match_length

    @property
    def num_free(self) -> int:
        """Further tokens that there is room for."""
        return len(self._tokens) - self._text.num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        self.make_room(len(token_ids))
        first = self._text.num_tokens
        self._tokens[first : first + len(token_ids)] = token_ids
        self._extend(self._reference, len(token_ids))

    def propose(self, num_tokens: int) -> list[int]:
        drafts = (c_uint32 * num_tokens)()
        num_drafts = self._propose(self._reference, num_tokens, drafts)
        return drafts[:num_drafts]

    def make_room(self, num_tokens: int) -> None:
        """Have room for so many further tokens. If there is too little, index those that are there again."""
        if num_tokens <= self.num_free:
            return
        capacity, text = FIRST_CAPACITY, self._text
        while capacity < text.num_tokens + num_tokens:
            capacity *= 2
        known, self._tokens = self._tokens[: text.num_tokens], np.zeros(capacity, np.uint32)
        self._tokens[: len(known)] = known
        # [lengths, entries]: more than half of them stay empty
        self._tables = np.zeros((text.longest - text.shortest + 1, 2 * capacity), np.uint32)
        text.tokens, text.tables = self._tokens.ctypes.data, self._tables.ctypes.data
        text.num_entries, text.num_tokens = 2 * capacity, 0
        self._extend(self._reference, len(known))


Index = Lookup | CompiledLookup

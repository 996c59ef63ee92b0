"""Who asks the dispatcher, for what, which adapters' contents that uses, and what comes back, token by token.

The name of a request's adapter is resolved and authorised; its content (the digest) may not be loaded yet.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any, ClassVar, Self

from starlette.requests import Request

from lorikeet.adapters.keys import Key, Keys
from lorikeet.adapters.refs import Pin
from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import BY_VALUE
from lorikeet.proto.params import (
    NO_SPECULATION,
    Composition,
    Grammar,
    LogprobParams,
    Pooling,
    SamplingParams,
    Speculation,
)
from lorikeet.router.errors import NoHeads, ValidationError
from lorikeet.router.http_protocol import header
from lorikeet.router.text.stop import ReasoningSyntax
from lorikeet.router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Merging:
    """How several adapters are merged; the parameters of PEFT's `add_weighted_adapter`."""

    weights: tuple[float, ...]
    strategy: str
    density: float | None
    majority_sign_method: str


@dataclass(frozen=True)
class Adapter:
    """An adapter, or several to merge, that a request uses."""

    name: str
    """What the caller wrote: an alias, an id, or several separated by commas."""
    pins: tuple[Pin, ...]
    merging: Merging | None = None
    token: str | None = field(default=None, repr=False, compare=False)
    """The token that authorised access at the source."""
    tokens: tuple[str | None, ...] = field(default=(), repr=False, compare=False)
    """Access tokens for the parts of a merge: none for public parts, the operator's for its own."""
    alias: str = ""
    """Empty for an adapter that the catalogue does not list."""
    weight: float = 1.0
    """Weight of the adapter's flow in the fair queue."""
    chat_template: str | None = field(default=None, repr=False, compare=False)
    """The operator's, which takes precedence over the adapter's own."""
    caller: str = field(default="", compare=False)
    """The caller's identity, which has turns of its own in the loader; "" for the operator's adapters."""
    request_field: str = field(default="model", compare=False)
    """The request's field that named it, for errors; `model` where other requests may share the object."""

    @cached_property
    def content(self) -> str:
        """A key that is equal for adapters of equal content."""
        if self.merging is None:
            (pin,) = self.pins
            return f"{pin.source.value}:{pin.id}@{pin.revision}"
        return "merge:" + hashlib.sha256(json.dumps(self.call, sort_keys=True).encode()).hexdigest()

    @cached_property
    def flow(self) -> str:
        """The adapter's flow in the fair queue."""
        return f"{self.alias}|{self.content}"

    @cached_property
    def parts(self) -> tuple["Adapter", ...]:
        """The adapters of a merge; none for a single adapter."""
        if self.merging is None:
            return ()
        pairs = zip(self.pins, self.tokens or (self.token,) * len(self.pins), strict=True)
        return tuple(Adapter(pin.id, (pin,), token=token, caller=self.caller) for pin, token in pairs)

    @property
    def load_call(self) -> dict[str, Any]:
        """The call to the loader, for this caller."""
        tokens = {} if self.merging is None else {"tokens": list(self.tokens)}
        return {**self.call, "token": self.token, **tokens, "caller": self.caller}

    @property
    def call(self) -> dict[str, Any]:
        """The call to the loader, equal for adapters of equal content."""
        if self.merging is None:
            return {"fetch": self.pins[0].as_dict()}
        return {"merge": {"pins": [pin.as_dict() for pin in self.pins], **asdict(self.merging)}}

    @property
    def source(self) -> str:
        """Source of the first adapter, as LoRAX reports it."""
        return self.pins[0].source.value

    @property
    def revision(self) -> str:
        return ",".join(pin.revision for pin in self.pins)


@dataclass(frozen=True)
class Loaded:
    """An adapter whose file is in the loader's store."""

    digest: str
    num_bytes: int
    rank: int
    tier: str
    """Where it was loaded from: `source` or `disk`."""
    num_heads: int = 0
    """Number of Medusa heads."""
    invocation_ids: tuple[int, ...] = ()
    """Token ids that activate an activated LoRA (aLoRA): it applies from their last occurrence in the prompt on."""
    changes_nothing: bool = False
    """Whether it computes what the base model does."""
    scaling: float | None = None
    """As in the loader's `Entry`: None for an adapter that has more than factors."""
    num_virtual: int = 0
    """Virtual tokens that it puts before the prompt."""

    @property
    def is_heads_only(self) -> bool:
        """Whether it leaves the base model's output unchanged."""
        return self.num_heads > 0 and self.rank == 0 and not self.num_virtual


@dataclass(frozen=True)
class Heads:
    """Medusa heads that propose draft tokens for a request in addition to its adapter."""

    adapter: Adapter
    """The adapter that contains them; only its heads are used."""
    content: Loaded | None = None
    """Content of the operator's default heads, which stay loaded; the adapter's own heads precede these."""


class FinishReason(Enum):
    """Why a generation ended, in LoRAX's words (`details.finish_reason`). The shard's enumeration has the wire's
    values; both are named after the field that users read.
    """

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True)
class GenerationRequest:
    """One text to generate, checked and tokenized; with `pooling` a vector or scores instead."""

    prompt_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams = field(default_factory=partial(LogprobParams, wanted=True))
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    """The base's with the tokens that the adapter adds; None for the base's."""
    text: str = field(default="", repr=False)
    """The prompt before tokenization; empty for one that came as token ids."""
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True
    """Whether the stop string stays in the text (LoRAX) or is cut off (OpenAI)."""
    include_stop_token: bool = False
    """Whether the text of the token that ended the output is shown, unless it is a special token that is hidden."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, in addition to the model's."""
    bad_words: tuple[str, ...] = ()
    """Words of `sampling` as the request has them."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text nevertheless."""
    reasoning: ReasoningSyntax | None = None
    """How the output writes reasoning, in which no stop string counts; None where all of it is the answer."""
    request_id: str = ""
    priority: int = 0
    """Priority among the waiting requests of one flow: lower values are sent first."""
    caller: str = ""
    """The identity of who sent it: callers have equal shares."""
    share: float = 1.0
    """The weight of its caller."""
    cache_salt: str = ""
    tenant: str = ""
    """An opaque id of the requests whose outputs are proposed as drafts to each other; empty for none."""
    learning_tenant: str = ""
    """An opaque id of the requests from whose outputs heads are learned that draft for them."""
    adapter: Adapter | None = None
    """None for the base model."""
    heads: Heads | None = None
    """None for the heads of the adapter itself, if it has any."""
    speculation: Speculation = NO_SPECULATION
    needs_heads: bool = False
    """Whether the request asked for Medusa heads, and fails without them."""
    grammar: Grammar | None = None
    """What the output follows."""
    grammar_kind: str = ""
    """json_schema | regex | choice | grammar; "" without one."""
    grammar_value: Any = None
    """What the request has: a JSON schema, a pattern, texts, or a grammar in Lark's or GBNF's syntax."""
    pooling: Pooling | None = None
    receipt: bool = False
    """Whether the answer includes a receipt."""
    is_probe: bool = False
    """Whether its output is discarded: of a health probe, or of a prompt that is only scored."""

    @property
    def masks(self) -> list[str]:
        """The fields that exclude tokens."""
        masks = {
            "allowed_token_ids": self.sampling.allowed_ids,
            "bad_words": self.bad_words,
            "min_tokens": self.sampling.min_tokens,
        }
        return [name for name, value in masks.items() if value]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Tokens that are possible at one position, the likeliest first. They stay numbers until an answer is written: as
    objects, 200 of them cost more time and memory than all else of a token.
    """

    ids: "array[int]"
    logprobs: "array[float]"
    tokenizer: Tokenizer

    @classmethod
    def of(cls, ids: Iterable[int], logprobs: Iterable[float], tokenizer: Tokenizer) -> Self:
        """Raises ValueError where ids and log probabilities differ in number."""
        alternatives = cls(array("Q", ids), array("f", logprobs), tokenizer)
        if len(alternatives.ids) != len(alternatives.logprobs):
            raise ValueError("alternatives and their log probabilities differ in number")
        return alternatives

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, str, float]]:
        """Id, text and log probability of each."""
        return zip(self.ids, map(self.tokenizer.token_text, self.ids), self.logprobs, strict=True)

    def first(self, count: int) -> "Alternatives":
        """The likeliest `count`."""
        return self if count >= len(self) else self.part(slice(count))

    def part(self, span: slice) -> "Alternatives":
        """Some of them."""
        return Alternatives(self.ids[span], self.logprobs[span], self.tokenizer)


@dataclass(slots=True)
class OutputToken:
    """One emitted token."""

    id: int
    text: str
    """The text it adds; empty while a character is incomplete."""
    logprob: float
    special: bool
    skipped: bool
    """Emitted by the same step as the token before it."""
    source: int
    """A key of `SOURCE_NAMES` in lorikeet/proto/draft_sources.py."""
    alternatives: Alternatives | None = None
    hidden: bool = False
    """Whether its text is left out of the generated text."""
    num_earlier: int = 0
    """Characters at the start of its text that are an incomplete character of earlier tokens: never left out."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of a prompt's tokens. They stay as the shard sent them until an answer is written: as objects
    they would take ten times as much memory.
    """

    ids: Sequence[int]
    output: pb.RequestOutput
    num_alternatives: int
    tokenizer: Tokenizer

    @property
    def num_entries(self) -> int:
        """Tokens and alternatives."""
        return len(self.ids) + len(self.output.prefill_alternative_ids)

    @property
    def ranks(self) -> Sequence[int]:
        """Of the tokens from the second on; 1 is the likeliest. Empty where they were not requested."""
        return self.output.prefill_ranks

    def tokens(self) -> Iterator[tuple[int, str, float | None]]:
        """Id, text and log probability of each token; the first has none."""
        values: Iterable[float | None] = (None, *self.output.prefill_logprobs)
        return (
            (token_id, self.tokenizer.token_text(token_id), value)
            for token_id, value in zip(self.ids, values, strict=False)
        )

    def alternatives(self) -> Iterator[Alternatives]:
        """Those of each token; none of the first."""
        ids, logprobs = self.output.prefill_alternative_ids, self.output.prefill_alternative_logprobs
        every, count = Alternatives.of(ids, logprobs, self.tokenizer), self.num_alternatives
        yield every.first(0)
        for index in range(len(self.ids) - 1):
            yield every.part(slice(index * count, (index + 1) * count))


@dataclass(slots=True)
class OutputChunk:
    """What was added to a generation since the previous chunk."""

    tokens: list[OutputToken]
    text: str
    """Text that can be shown (held back while it could be the beginning of a stop string)."""
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    prefill: PromptScores | None = None
    """In the first chunk, where requested."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the output; None at an end-of-text token or the maximum length."""
    num_bytes: int = 0
    """Memory that it takes."""


@dataclass(slots=True)
class ColumnToken:
    """One request's token of `TokenColumns`, with what is read of a `RequestOutput`."""

    id: int
    token_ids: tuple[int]
    logprobs: Sequence[float]
    """One, or none."""
    alternative_ids: Sequence[int]
    alternative_logprobs: Sequence[float]
    sources: ClassVar[bytes] = bytes([pb.SOURCE_TARGET])
    step_ends: ClassVar[bytes] = b"\1"
    num_drafted: ClassVar[Sequence[int]] = ()
    num_accepted: ClassVar[int] = 0
    num_cached_tokens: ClassVar[int] = 0
    draft_seconds: ClassVar[float] = 0.0
    verify_seconds: ClassVar[float] = 0.0
    accept_seconds: ClassVar[float] = 0.0
    prefill_logprobs: ClassVar[Sequence[float]] = ()
    prefill_ranks: ClassVar[Sequence[int]] = ()
    prefill_alternative_ids: ClassVar[Sequence[int]] = ()
    prefill_alternative_logprobs: ClassVar[Sequence[float]] = ()
    pooled: ClassVar[bytes] = b""
    finish_reason: ClassVar[pb.FinishReason] = pb.FINISH_NONE
    error: ClassVar[str] = ""
    retryable: ClassVar[bool] = False
    in_step: ClassVar[bool] = False


ShardOutput = pb.RequestOutput | ColumnToken


def drafted_outputs(columns: pb.TokenColumns) -> Iterator[pb.RequestOutput]:
    """The outputs of requests whose step verified drafts: `columns.num_tokens` is set. Raises ValueError if the columns
    differ in length.
    """
    num_rows, num_tokens = len(columns.ids), len(columns.token_ids)
    k = len(columns.alternative_ids) // max(num_tokens, 1)
    lengths = [len(columns.num_tokens), len(columns.num_drafted), len(columns.num_accepted), len(columns.draft_sources)]
    by_token = [sum(columns.num_tokens), len(columns.sources), len(columns.logprobs) or num_tokens]
    alternatives = [len(columns.alternative_ids), len(columns.alternative_logprobs)]
    is_valid = lengths == 4 * [num_rows] and by_token == 3 * [num_tokens] and alternatives == 2 * [k * num_tokens]
    if not is_valid or len(columns.seconds) != 3:
        raise ValueError("columns differ in length")
    first, counts = 0, (columns.num_tokens, columns.num_drafted, columns.num_accepted)
    rows = zip(columns.ids, columns.draft_sources, *counts, strict=True)
    for wire_id, source, count, num_drafted, num_accepted in rows:
        span = slice(first, first + count)
        of_alternatives = slice(k * first, k * (first + count))
        first += count
        output = pb.RequestOutput(
            id=wire_id,
            token_ids=columns.token_ids[span],
            sources=columns.sources[span],
            step_ends=bytes(count - 1) + b"\1",
            logprobs=columns.logprobs[span],
            alternative_ids=columns.alternative_ids[of_alternatives],
            alternative_logprobs=columns.alternative_logprobs[of_alternatives],
        )
        if num_drafted:
            output.num_drafted.extend(num_drafted * (source == other) for other in BY_VALUE)
            output.num_accepted = num_accepted
            output.draft_seconds, output.verify_seconds, output.accept_seconds = columns.seconds
        yield output


class ColumnRows:
    """`TokenColumns` as Python values, one row per request."""

    def __init__(self, columns: pb.TokenColumns) -> None:
        """Raises ValueError if the columns differ in length."""
        self.has_drafts = bool(columns.num_tokens)
        """Whether a row may have several tokens, and says more than `__iter__` gives: `token` has all."""
        self._drafted = list(drafted_outputs(columns)) if self.has_drafts else []
        if self.has_drafts:
            columns = pb.TokenColumns(ids=columns.ids, token_ids=[part.token_ids[0] for part in self._drafted])
        self.ids, self._token_ids = list(columns.ids), list(columns.token_ids)
        self._logprobs = list(columns.logprobs)
        self._alternative_ids, self._alternative_logprobs = columns.alternative_ids, columns.alternative_logprobs
        num_rows = len(self.ids)
        k = self._num_alternatives = len(columns.alternative_ids) // max(num_rows, 1)
        lengths = len(self._token_ids), len(columns.alternative_ids), len(columns.alternative_logprobs)
        if lengths != (num_rows, k * num_rows, k * num_rows) or len(self._logprobs) not in (0, num_rows):
            raise ValueError("columns differ in length")

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        """Id, first token and log probability of each row, 0 without one."""
        return zip(self.ids, self._token_ids, self._logprobs or [0.0] * len(self.ids), strict=True)

    def token(self, index: int) -> ShardOutput:
        """One row."""
        if self.has_drafts:
            return self._drafted[index]
        k = self._num_alternatives
        span = slice(k * index, k * index + k)
        return ColumnToken(
            self.ids[index],
            (self._token_ids[index],),
            self._logprobs[index : index + 1],
            self._alternative_ids[span],
            self._alternative_logprobs[span],
        )


KEY_HEADER = "x-api-key"


@dataclass(frozen=True)
class Caller:
    """Caller of one request."""

    request_id: str
    key: Key | None = None
    """The server's own API key that it sent."""
    token: str | None = field(default=None, repr=False)
    """A bearer token that is not one, for example of a source."""
    address: str = ""
    """The client's IPv4 address or IPv6 /64, resolved through trusted proxies; empty where there is none."""
    is_foreign_page: bool = False
    """Whether a page of another site sent it, without a key."""

    @property
    def identity(self) -> str:
        """What limits and turns per caller count by: the key, else the address."""
        return f"key:{self.key.name}" if self.key is not None else f"address:{self.address}"

    @property
    def share(self) -> float:
        """The caller's weight next to other callers."""
        return 1.0 if self.key is None else self.key.weight

    def cache_salt(self, salt: str | None) -> str:
        """Requests share cached prefixes only under equal salts. `salt` is that of the request."""
        own = f"key:{self.key.name}" if self.key is not None and self.key.isolate else ""
        return own if salt is None else f"{own}\0{salt}"

    def tenant(self, salt: str | None) -> str:
        """An opaque id; outputs are proposed as drafts to requests of the same tenant only. It is of the key's name;
        without a key, of the request's `salt`. Empty for a key that is marked `isolate`.
        """
        if self.key is not None and self.key.is_marked_isolate:
            return ""
        name = f"salt:{salt or ''}" if self.key is None else f"key:{self.key.name}"
        return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]


def caller(request: Request, keys: Keys) -> Caller:
    """The caller of `request`, by the keys in force at the first call."""
    state = request.scope.setdefault("state", {})  # what `request.state` has, which is slower
    sender: Caller | None = state.get("caller")
    if sender is None:
        token = bearer(request)
        if (key := keys.find(token)) is not None:
            token = None
        else:
            key = keys.find(header(request.scope, KEY_HEADER.encode()))
        is_foreign = key is None and state.get("is_foreign", False)
        sender = Caller(state["request_id"], key, token, state.get("address", ""), is_foreign)
        state["caller"] = sender
    return sender


def offered(request: Request) -> tuple[str | None, str | None]:
    """What a request presents: in KEY_HEADER, and as the token of the Authorization header."""
    return header(request.scope, KEY_HEADER.encode()) or None, bearer(request)


def bearer(request: Request) -> str | None:
    """The token of the Authorization header."""
    scheme, _, token = (header(request.scope, b"authorization") or "").partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None


MOST_RANK, RANK_TILE = 512, 16
"""Most factors of a sum, and what those of each adapter are rounded up to: devices have room for so many."""


def composition_of(merging: Merging, parts: Sequence[Loaded]) -> Composition | None:
    """How PEFT's `add_weighted_adapter` adds these, `cat` or `linear`. None for what needs a merged file: other
    strategies, adapters with more than factors, and factors that do not fit.
    """
    if any(part.scaling is None for part in parts):
        return None
    if sum(-(-part.rank // RANK_TILE) * RANK_TILE for part in parts) > MOST_RANK:
        return None
    digests = tuple(part.digest for part in parts)
    if merging.strategy == "cat":
        return Composition(digests, merging.weights, (1.0,) * len(parts))
    if (
        merging.strategy != "linear"
        or len({part.rank for part in parts}) > 1
        or not all(part.scaling for part in parts)
    ):
        return None
    scalings = [part.scaling or 0.0 for part in parts]
    # PEFT multiplies A and B by the root of weight and scaling; B is served with the scaling inside
    roots = [math.sqrt(abs(weight) * scaling) for weight, scaling in zip(merging.weights, scalings, strict=True)]
    # the sign goes to one factor only, or it would cancel out
    shrinks = tuple(math.copysign(root, weight) for root, weight in zip(roots, merging.weights, strict=True))
    expands = tuple(root / scaling for root, scaling in zip(roots, scalings, strict=True))
    return Composition(digests, shrinks, expands, shares_factors=True)


def digest_of(composition: Composition) -> str:
    """What identifies a sum: its adapters and their weights."""
    weights = composition.shrink_weights, composition.expand_weights
    content = ["sum", composition.digests, *weights, composition.shares_factors]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class ResolvedAdapters:
    """Adapter and heads of one request, with their contents.

    An adapter that has only heads does not change the base model's output: the shard runs such a request on the base
    model with these heads, so that it shares the base model's pages. An activated LoRA (aLoRA) applies from the last
    occurrence of its invocation tokens in the prompt on, as in PEFT; without an occurrence the base model answers. The
    position is found in the original prompt only, so a request that continues on another shard has the same one.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._adapter: Loaded | None = None
        self._heads: Loaded | None = None
        self._parts: list[Loaded] = []
        """Of a merge, those that are resolved."""
        self.composition: Composition | None = None
        """The sum that the shard computes from the parts of a merge."""
        self.most_composed = 0
        """Adapters whose sum every shard can compute; a merge of more needs a file."""
        self.max_total_tokens = 0
        """The least of all shards."""
        self.start = 0
        """Position of the first token that the adapter applies to; -1 where its invocation tokens are missing."""

    @property
    def is_activated(self) -> bool | None:
        """Whether an activated LoRA applies; None for any other adapter, and for none."""
        return None if self._adapter is None or not self._adapter.invocation_ids else self.start >= 0

    @property
    def prefix_content(self) -> str:
        """The content under whose digest the beginning of the prompt is cached."""
        return "" if self.start else self.digest

    @property
    def next_unresolved(self) -> Adapter | None:
        """The adapter whose content is needed next; None once everything is resolved."""
        request, heads = self._request, self._request.heads
        if request.adapter is not None and self._adapter is None:
            return self._next_part or request.adapter
        if heads is None or heads.content is not None or self._heads is not None:
            return None
        return heads.adapter

    @property
    def _next_part(self) -> Adapter | None:
        """The next part of a merge that shards may compute from its parts."""
        adapter = self._request.adapter
        if adapter is None or adapter.merging is None or adapter.merging.strategy not in ("cat", "linear"):
            return None
        if not len(self._parts) < len(adapter.parts) <= self.most_composed:
            return None
        return adapter.parts[len(self._parts)]

    @property
    def awaits_heads(self) -> bool:
        """Whether only the heads given in addition to the adapter are unresolved."""
        return self.next_unresolved is not None and (self._request.adapter is None or self._adapter is not None)

    def set_loaded(self, content: Loaded) -> None:
        """Set the content of `next_unresolved`."""
        if self.awaits_heads:
            self._heads = content
            return
        if self._next_part is not None:
            self._take_part(content)
            return
        self._adapter = content
        if content.invocation_ids:
            self.start = last_occurrence(self._request.prompt_ids, content.invocation_ids)

    def _take_part(self, content: Loaded) -> None:
        """One more part of a merge. If shards cannot add them up, the merge needs a file, and is resolved next."""
        adapter = self._request.adapter
        assert adapter is not None and adapter.merging is not None
        self._parts.append(content)
        if len(self._parts) < len(adapter.parts):
            return
        composition = composition_of(adapter.merging, self._parts)
        if composition is not None:
            tiers = {part.tier for part in self._parts}
            tier = "source" if "source" in tiers else self._parts[0].tier
            rank = sum(part.rank for part in self._parts)
            self._adapter, self.composition = Loaded(digest_of(composition), 0, rank, tier), composition

    def check(self) -> None:
        """Check that virtual tokens fit, and that the requested heads exist. Raises ValidationError."""
        num_tokens = len(self._request.prompt_ids) + self._request.max_new_tokens
        if self.num_virtual and num_tokens + self.num_virtual > self.max_total_tokens:
            raise ValidationError(
                f"prompt and output have {num_tokens} tokens and the adapter {self.num_virtual} virtual ones; at most"
                f" {self.max_total_tokens} fit in all: shorten the prompt or `max_new_tokens`"
            )
        heads = self._request.heads
        if heads is not None and self._heads is not None and not self._heads.num_heads:
            raise ValidationError(f"`heads_id` {heads.adapter.name[:256]} brings no heads", "heads_id")
        if self._request.needs_heads and not self.num_heads:
            raise NoHeads

    @property
    def _external_heads(self) -> Loaded | None:
        """The heads that replace the adapter's own: those that the request names, else the operator's."""
        heads = self._request.heads
        has_own = self._adapter is not None and self._adapter.num_heads > 0
        if heads is None or (heads.content is not None and has_own):
            return None
        return self._heads or heads.content

    @property
    def num_heads(self) -> int:
        """Number of heads that propose draft tokens for the request."""
        proposing = self._external_heads or self._adapter
        return 0 if proposing is None else proposing.num_heads

    @property
    def can_speculate(self) -> bool:
        """Whether any draft token can be proposed for the request."""
        return self._request.speculation.is_possible(self.num_heads > 0 or bool(self._request.learning_tenant))

    @property
    def digest(self) -> str:
        """Digest of the adapter's content, whatever it has; "" for the base model."""
        return "" if self._adapter is None else self._adapter.digest

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of all contents that are resolved."""
        heads = None if self._request.heads is None else self._request.heads.content
        contents = (*self._parts, self._adapter, self._heads, heads)
        return tuple(content.digest for content in contents if content is not None)

    @property
    def adapter_digests(self) -> tuple[str, ...]:
        """Of the adapter, or of the adapters of a sum."""
        if self.composition is not None:
            return self.composition.digests
        return (self.digest,) if self.digest else ()

    @property
    def num_virtual(self) -> int:
        """Virtual tokens before the prompt."""
        return 0 if self._adapter is None else self._adapter.num_virtual

    @property
    def tier(self) -> str:
        """Where the loader had the adapter's content from; "" for the base model."""
        return "" if self._adapter is None else self._adapter.tier

    @property
    def affinity_key(self) -> str:
        """The digest by which a shard is chosen; "" for any shard."""
        digest = self.adapter_digests[0] if self.adapter_digests and self.start >= 0 else ""
        return digest or ("" if self._heads is None else self._heads.digest)

    @property
    def adapter_pin(self) -> tuple[Adapter, str] | None:
        """The adapter that the shard applies to the base model, and its digest."""
        adapter = self._request.adapter
        if adapter is None or self._adapter is None or self._adapter.is_heads_only or self.start < 0:
            return None
        return adapter, self._adapter.digest

    @property
    def slot_pins(self) -> list[tuple[Adapter, str]]:
        """The contents that the shard needs in slots, with their digests."""
        adapter, heads = self.adapter_pin, self.heads_pin
        adapters = [] if adapter is None else [adapter]
        if adapter is not None and self.composition is not None:
            adapters = list(zip(adapter[0].parts, self.composition.digests, strict=True))
        return adapters if heads is None else [*adapters, heads]

    @property
    def heads_pin(self) -> tuple[Adapter, str] | None:
        """The adapter whose heads propose draft tokens, unless they are the adapter's own, and its digest."""
        if not self.num_heads or not self._request.speculation.num_heads:
            return None
        heads, external, adapter = self._request.heads, self._external_heads, self._request.adapter
        if heads is not None and external is not None:
            return heads.adapter, external.digest
        if adapter is None or self._adapter is None or not self._adapter.is_heads_only:
            return None
        return adapter, self._adapter.digest


def last_occurrence(token_ids: Sequence[int], invocation_ids: Sequence[int]) -> int:
    """Where `invocation_ids` begin for the last time in `token_ids`; -1 where they do not occur."""
    size = len(invocation_ids)
    for first in range(len(token_ids) - size, -1, -1):
        if token_ids[first] == invocation_ids[0] and tuple(token_ids[first : first + size]) == tuple(invocation_ids):
            return first
    return -1

"""Parameters of a request that router and shard both know: neutral values, ranges, and their form on the wire.

The defaults are neutral: without any parameter, tokens are the arg max of the model's scores, and nothing is drafted.
`to_wire` writes parameters into a Submit message, `from_wire` reads them from one, and `check` raises ValueError for a
value outside its range, whether a router or a shard asks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Self, TypeVar, get_type_hints

from lorikeet.proto import shard_pb2 as pb

MAX_VOCAB_SIZE = 1 << 32
"""Number of token ids that the wire can carry."""


@dataclass(frozen=True)
class Range:
    """The numbers that a parameter may be. The bounds have the names of pydantic's."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __contains__(self, value: float) -> bool:
        """False for NaN, even if there is no bound."""
        return (
            value == value
            and (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        """The finite bounds as a rule: `> 0 and <= 1`."""
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        return " and ".join(f"{signs[name]} {bound:g}" for name, bound in self.bounds.items())

    @property
    def bounds(self) -> dict[str, float]:
        """The finite bounds, as keyword arguments of pydantic's `Field`."""
        return {name: bound for name, bound in vars(self).items() if bound is not None and math.isfinite(bound)}


MAX_REPETITION_PENALTY = 1e10
"""With a penalty further from 1, logits overflow."""
MAX_BAD_WORD_TOKENS = 64
MAX_ALTERNATIVES = 256
"""Maximum tokens that are listed for one position."""
FIRST_VIRTUAL_ID = 1 << 30
"""In a shard, the id of an adapter's first virtual token: beyond every vocabulary."""
MAX_MERGED = 32
"""Maximum adapters whose sum one request uses."""
MAX_MERGE_WEIGHT = 1e6
"""Maximum weight of an adapter in a merge or a sum, and minimum with a minus sign."""
MAX_DRAFT_TOKENS = 64
"""Maximum draft tokens of one step."""
ALL_HEADS = 255
"""`Speculation.num_heads` of a request that uses every Medusa head."""
LOGIT_BIAS_RANGE = Range(ge=-100, le=100)


def ranges(params: type[Any]) -> dict[str, Range]:
    """The ranges of the numbers of a class below, by their names."""
    annotations = get_type_hints(params, include_extras=True)
    marks = {name: getattr(annotation, "__metadata__", ()) for name, annotation in annotations.items()}
    return {name: mark for name, values in marks.items() for mark in values if isinstance(mark, Range)}


def _check_ranges(params: Any) -> None:
    for name, allowed in _RANGES[type(params)].items():
        if getattr(params, name) not in allowed:
            raise ValueError(f"{name} is out of range: it must be {allowed}")


def _check_ids(token_ids: Iterable[int], vocab_size: int, name: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ValueError(f"token id {largest} of {name} is outside the vocabulary of {vocab_size}")


def _scalars(params: type, message: Any) -> tuple[str, ...]:
    """Names of the fields that a class shares with a message and that are single values."""
    names = message.DESCRIPTOR.fields_by_name
    return tuple(field.name for field in fields(params) if field.name in names and not isinstance(field.default, tuple))


def _copy(source: object, target: object, names: Iterable[str]) -> None:
    """Zero, false and an empty text are what a new message has."""
    for name in names:
        if value := getattr(source, name):
            setattr(target, name, value)


def _read(message: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled. The wire's Sampling message says in which order the parameters apply."""

    do_sample: bool = False
    """Without it the arg max of the penalised scores is taken: temperature and filters have no effect."""
    temperature: Annotated[float, Range(gt=0, lt=math.inf)] = 1.0
    top_k: Annotated[int, Range(ge=0)] = 0
    """0 is off."""
    top_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Range(ge=0, le=1)] = 0.0
    typical_p: Annotated[float, Range(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, Range(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    frequency_penalty: Annotated[float, Range(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Range(ge=-2, le=2)] = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    watermark: bool = False
    allowed_ids: tuple[int, ...] = ()
    """The only tokens that can be sampled, empty for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never occur in the output."""
    min_tokens: Annotated[int, Range(ge=0)] = 0
    """Output tokens until which `min_tokens_stop_ids` are excluded."""
    min_tokens_stop_ids: tuple[int, ...] = ()
    """Tokens excluded until the output has `min_tokens` tokens."""
    seed: Annotated[int, Range(ge=0, lt=2**64)] = 0

    def check(self, vocab_size: int = MAX_VOCAB_SIZE) -> None:
        """Raises ValueError, which names the parameter."""
        _check_ranges(self)
        for token_id, bias in self.logit_bias:
            if bias not in LOGIT_BIAS_RANGE:
                raise ValueError(f"logit_bias of token {token_id} is out of range: it must be {LOGIT_BIAS_RANGE}")
        if any(not 1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words):
            raise ValueError(f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens")
        _check_ids((token_id for token_id, _ in self.logit_bias), vocab_size, "the logit bias")
        _check_ids(self.allowed_ids, vocab_size, "allowed_ids")
        _check_ids(self.min_tokens_stop_ids, vocab_size, "min_tokens_stop_ids")
        _check_ids((token_id for word in self.bad_words for token_id in word), vocab_size, "bad_words")

    def to_wire(self, submit: pb.Submit) -> None:
        """Write the parameters into a message."""
        message = submit.sampling
        submit.seed = self.seed
        _copy(self, message, _SAMPLING)
        message.bias_ids.extend(token_id for token_id, _ in self.logit_bias)
        message.bias_values.extend(bias for _, bias in self.logit_bias)
        message.allowed_ids.extend(self.allowed_ids)
        message.min_tokens_stop_ids.extend(self.min_tokens_stop_ids)
        for word in self.bad_words:
            message.bad_words.add(token_ids=word)

    @classmethod
    def from_wire(cls, submit: pb.Submit) -> Self:
        """Raises ValueError for a logit bias whose ids and values differ in number."""
        message = submit.sampling
        if len(message.bias_ids) != len(message.bias_values):
            raise ValueError("bias_ids and bias_values differ in length")
        return cls(
            **_read(message, _SAMPLING),
            logit_bias=tuple(zip(message.bias_ids, message.bias_values, strict=True)),
            allowed_ids=tuple(message.allowed_ids),
            bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
            min_tokens_stop_ids=tuple(message.min_tokens_stop_ids),
            seed=submit.seed,
        )

    def excludes_all(self, end_ids: frozenset[int]) -> bool:
        """Whether every token is excluded from the start on. `end_ids` may not end the output yet."""
        excluded = {word[0] for word in self.bad_words if len(word) == 1} | end_ids
        return bool(self.allowed_ids) and excluded.issuperset(self.allowed_ids)

    @property
    def is_penalised(self) -> bool:
        """Whether tokens that occurred before have other scores."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def reads_history(self) -> bool:
        """Whether masks depend on several tokens before."""
        return any(len(word) > 1 for word in self.bad_words)

    @property
    def depends_on_history(self) -> bool:
        """Whether the distribution depends on earlier tokens by more than the logits."""
        return self.is_penalised or self.watermark or self.reads_history

    @property
    def has_masks(self) -> bool:
        """Whether any token is excluded, at least at some positions."""
        return bool(self.allowed_ids or self.bad_words or (self.min_tokens and self.min_tokens_stop_ids))


_SAMPLING = _scalars(SamplingParams, pb.Sampling)
_NEUTRAL = SamplingParams()
NUMBERS = tuple(name for name in ranges(SamplingParams) if name not in ("min_tokens", "seed"))
"""Sampling parameters that are numbers with the same name in requests, in the defaults of aliases and in receipts."""
FILTERS = {name: getattr(_NEUTRAL, name) for name in NUMBERS if name != "temperature" and not name.endswith("_penalty")}
"""Those that exclude unlikely tokens, and so have an effect on sampled tokens only, with their neutral values."""


@dataclass(frozen=True)
class LogprobParams:
    """Which log probabilities are returned."""

    wanted: bool = False
    """Whether each output token has one."""
    alternatives: Annotated[int, Range(ge=0, le=MAX_ALTERNATIVES)] = 0
    """Other tokens listed at each position of the output: the most likely ones, unless `alternative_ids` names them."""
    alternative_ids: tuple[int, ...] = ()
    """Tokens listed in place of the most likely ones; empty or as many as `alternatives`."""
    raw: bool = False
    """Of the model's own logits (OpenAI) instead of the distribution that tokens are sampled from (LoRAX)."""
    prefill: bool = False
    """Whether each prompt token from the second on has one; always of the model's own logits."""
    prefill_alternatives: Annotated[int, Range(ge=0, le=MAX_ALTERNATIVES)] = 0
    """Most likely tokens listed at each position of the prompt."""
    prefill_ranks: bool = False
    """Whether the ranks of prompt tokens are returned too."""

    def check(self, vocab_size: int = MAX_VOCAB_SIZE) -> None:
        """Raises ValueError, which names the parameter."""
        if max(self.alternatives, self.prefill_alternatives) > min(MAX_ALTERNATIVES, vocab_size):
            raise ValueError(f"at most {min(MAX_ALTERNATIVES, vocab_size)} alternatives can be returned")
        if self.alternative_ids and len(self.alternative_ids) != self.alternatives:
            raise ValueError(f"{len(self.alternative_ids)} alternatives are named, and {self.alternatives} asked for")
        _check_ranges(self)
        _check_ids(self.alternative_ids, vocab_size, "alternative_ids")

    def to_wire(self, submit: pb.Submit) -> None:
        """Write the parameters into a message."""
        message = submit.logprobs
        _copy(self, message, _LOGPROBS)
        message.alternative_ids.extend(self.alternative_ids)
        message.mode = pb.Logprobs.RAW if self.raw else pb.Logprobs.PROCESSED

    @classmethod
    def from_wire(cls, submit: pb.Submit) -> Self:
        """The parameters of a message."""
        message = submit.logprobs
        named, is_raw = tuple(message.alternative_ids), message.mode == pb.Logprobs.RAW
        return cls(**_read(message, _LOGPROBS), alternative_ids=named, raw=is_raw)


_LOGPROBS = _scalars(LogprobParams, pb.Logprobs)


Name = TypeVar("Name", bound=StrEnum)


class Method(StrEnum):
    """What proposes draft tokens for a request."""

    OFF = "off"
    AUTO = "auto"
    LOOKUP = "lookup"
    MEDUSA = "medusa"
    DRAFT = "draft"


class Schedule(StrEnum):
    """How the number of draft tokens in a step is chosen, up to the request's own bound."""

    CONSTANT = "constant"
    HEURISTIC = "heuristic"
    AUTO = "auto"


class Verification(StrEnum):
    """How draft tokens are verified."""

    SHARED_NOISE = "shared-noise"
    """The target samples at every position with the noise that the draft model used (Gumbel coupling); a draft token is
    accepted if both are equal.
    """
    REJECTION = "rejection"
    """Leviathan et al. 2023, Algorithm 1; Chen et al. 2023."""

    @classmethod
    def _missing_(cls, value: object) -> "Verification | None":
        return cls.SHARED_NOISE if value == DEPRECATED_SHARED_NOISE else None


DEPRECATED_SHARED_NOISE = "coupled"
"""The earlier spelling of shared-noise, accepted for one release."""


@dataclass(frozen=True)
class Speculation:
    """How draft tokens are proposed and verified."""

    method: Method = Method.OFF
    num_tokens: Annotated[int, Range(ge=0, le=MAX_DRAFT_TOKENS)] = 0
    """Maximum draft tokens per step of prompt lookup or a draft model."""
    num_heads: Annotated[int, Range(ge=0)] = 0
    """Maximum draft tokens per step of Medusa heads; ALL_HEADS uses every head."""
    schedule: Schedule = Schedule.CONSTANT
    verify: Verification = Verification.SHARED_NOISE
    """The rejection rule applies to sampled tokens of a draft model."""
    prediction_ids: tuple[int, ...] = ()
    """The predicted output, from which draft tokens are copied."""

    def check(self, vocab_size: int = MAX_VOCAB_SIZE) -> None:
        """Raises ValueError, which names the parameter."""
        if self.num_tokens > MAX_DRAFT_TOKENS:
            raise ValueError(f"at most {MAX_DRAFT_TOKENS} draft tokens can be proposed per step")
        _check_ranges(self)
        _check_ids(self.prediction_ids, vocab_size, "the prediction")

    def to_wire(self, submit: pb.Submit) -> None:
        """Write the parameters into a message. Shared noise is sent as "": shards of version 0.1 know another name."""
        message = submit.speculation
        _copy(self, message, _SPECULATION)
        if self.verify is Verification.SHARED_NOISE:
            message.ClearField("verify")
        submit.prediction_ids.extend(self.prediction_ids)

    @classmethod
    def from_wire(cls, submit: pb.Submit) -> Self:
        """Raises ValueError for a method, schedule or verification that is unknown."""
        message = submit.speculation
        return cls(
            _named(Method, message.method, "method"),
            message.num_tokens,
            message.num_heads,
            _named(Schedule, message.schedule, "schedule"),
            _named(Verification, message.verify, "verification"),
            tuple(submit.prediction_ids),
        )

    def is_possible(self, has_heads: bool) -> bool:
        """Whether any draft token can be proposed, with Medusa heads or without."""
        return self.num_tokens > 0 or (self.num_heads > 0 and has_heads)

    @property
    def takes_heads(self) -> bool:
        """Whether Medusa heads may propose draft tokens."""
        return self.num_heads > 0 and self.method in (Method.MEDUSA, Method.AUTO)


_SPECULATION = _scalars(Speculation, pb.Speculation)
NO_SPECULATION = Speculation()


def _named(names: type[Name], value: str, field: str) -> Name:
    """The member of that value; the first one for an empty text. Raises ValueError."""
    try:
        return names(value or next(iter(names)))
    except ValueError:
        raise ValueError(f"the speculation {field} {value} is unknown; known: {', '.join(sorted(names))}") from None


@dataclass(frozen=True)
class Grammar:
    """A grammar that the output follows."""

    text: str
    """As llguidance serializes it."""
    proposes: bool = False
    """Whether the tokens that must follow are proposed as drafts."""

    def to_wire(self, submit: pb.Submit) -> None:
        """Write the grammar into a message."""
        submit.grammar.SetInParent()
        _copy(self, submit.grammar, ("text", "proposes"))

    @classmethod
    def from_wire(cls, submit: pb.Submit) -> Self | None:
        """None for a request without a grammar."""
        return cls(submit.grammar.text, submit.grammar.proposes) if submit.HasField("grammar") else None


@dataclass(frozen=True)
class Pooling:
    """What a request ends with in place of tokens."""

    task: str
    """As in lorikeet/proto/pooling.py."""
    second_text: int = 0
    """Index of the first token of the second text of a pair, 0 for a single text."""
    per_token: bool = False
    """Whether every token has a result, before pooling."""

    def to_wire(self, submit: pb.Submit) -> None:
        """Write the parameters into a message."""
        submit.pooling.SetInParent()
        _copy(self, submit.pooling, ("task", "second_text", "per_token"))

    @classmethod
    def from_wire(cls, submit: pb.Submit) -> Self | None:
        """None for a request that generates tokens."""
        message = submit.pooling
        return cls(message.task, message.second_text, message.per_token) if submit.HasField("pooling") else None


@dataclass(frozen=True)
class Composition:
    """Adapters whose sum a request uses: the sum over i of `expand_weights[i] B[i] h[i]`, where h[i] is
    `shrink_weights[i] A[i] x` or, with `shares_factors`, the sum of these over all adapters, which have equal ranks.
    """

    digests: tuple[str, ...]
    shrink_weights: tuple[float, ...]
    expand_weights: tuple[float, ...]
    shares_factors: bool = False

    def check(self) -> None:
        """Raises ValueError."""
        if not 1 <= len(self.digests) <= MAX_MERGED:
            raise ValueError(f"{len(self.digests)} adapters cannot be added: a request has 1 to {MAX_MERGED}")
        if not len(self.digests) == len(self.shrink_weights) == len(self.expand_weights):
            raise ValueError("every adapter of a sum needs two weights")
        if not all(map(math.isfinite, (*self.shrink_weights, *self.expand_weights))):
            raise ValueError("the weights of a sum of adapters must be finite")

    def to_wire(self, submit: pb.Submit) -> None:
        """Write it into a message."""
        submit.composition.digests.extend(self.digests)
        submit.composition.shrink_weights.extend(self.shrink_weights)
        submit.composition.expand_weights.extend(self.expand_weights)
        submit.composition.shares_factors = self.shares_factors

    @classmethod
    def from_wire(cls, submit: pb.Submit) -> Self | None:
        """Read what `to_wire` wrote, None without it."""
        if not submit.HasField("composition"):
            return None
        sent = submit.composition
        return cls(tuple(sent.digests), tuple(sent.shrink_weights), tuple(sent.expand_weights), sent.shares_factors)


_RANGES = {params: ranges(params) for params in (SamplingParams, LogprobParams, Speculation)}

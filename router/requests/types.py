"""What an HTTP route asks the dispatcher for, and what it gets back, token by token. Independent of HTTP."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lorikeet.router.requests.adapter_ref import Adapter, Heads
from lorikeet.router.text.reasoning import Reasoning


class FinishReason(Enum):
    """Why a generation ended, in LoRAX's words (`details.finish_reason`)."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


MAX_ALTERNATIVES = 256
"""Most alternatives per token that a shard returns."""
MAX_PENALTY = 1e10
"""Maximum repetition penalty; further from 1, logits overflow."""
PENALTY_RULE = f">= {1 / MAX_PENALTY:g} and <= {MAX_PENALTY:g}"


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; the fields of the wire's Sampling message. The shard's `SamplingParams` repeats them:
    router and shard share the wire and no code.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    watermark: bool = False
    allowed_ids: tuple[int, ...] = ()
    """The only tokens that can be sampled, empty for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never occur in the output."""

    def excludes_all(self, end_ids: frozenset[int]) -> bool:
        """Whether every token is excluded from the start on. `end_ids` may not end the output yet."""
        excluded = {word[0] for word in self.bad_words if len(word) == 1} | end_ids
        return bool(self.allowed_ids) and excluded.issuperset(self.allowed_ids)


@dataclass(frozen=True)
class Speculation:
    """How speculative decoding is done; the values of the wire's Speculation message."""

    method: str = "off"
    num_tokens: int = 0
    """At most so many draft tokens per step from prompt lookup or a draft model."""
    num_heads: int = 0
    """At most so many draft tokens per step from Medusa heads."""
    schedule: str = ""
    verify: str = "shared-noise"
    needs_heads: bool = False
    """Whether the request asked for heads explicitly, and fails without them."""
    takes_history: bool = False
    """Whether the outputs of earlier requests are proposed."""
    prediction_ids: tuple[int, ...] = ()
    """The predicted output, from which draft tokens are copied."""

    def is_possible(self, has_heads: bool) -> bool:
        """Whether any draft token can be proposed, where there may be Medusa heads or not."""
        return self.num_tokens > 0 or (self.num_heads > 0 and has_heads)


NO_SPECULATION = Speculation()
ALL_HEADS = 255
"""`num_heads` that uses every head."""


@dataclass(frozen=True)
class Grammar:
    """What an output follows."""

    kind: str
    """json_schema | regex | choice | grammar."""
    value: Any
    """As the request gave it: a JSON schema, a pattern, texts, or a grammar in Lark's or GBNF's syntax."""
    text: str
    """For shards, as llguidance serializes it."""
    proposes: bool
    """Whether the tokens that must follow are proposed as drafts."""


@dataclass(frozen=True)
class Pooling:
    """What a request ends with in place of tokens; the fields of the wire's Pooling message."""

    task: str
    """As in lorikeet/proto/pooling.py."""
    second_text: int = 0
    """Index of the first token of the second text of a pair, 0 for a single text."""
    per_token: bool = False
    """Whether every token has a result, before pooling."""


@dataclass(frozen=True)
class GenerationRequest:
    """One text to generate, checked and tokenized; with `pooling` a vector or scores instead."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int
    text: str = field(default="", repr=False)
    """The prompt before tokenization; empty for one that came as token ids."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True
    """Whether the stop string stays in the text (LoRAX) or is cut off (OpenAI)."""
    include_stop_token: bool = False
    """Whether the text of the token that ended the output is shown, unless it is a special token that is hidden."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, in addition to the model's."""
    min_tokens: int = 0
    """Until the output has so many tokens, nothing but `max_new_tokens` ends it."""
    bad_words: tuple[str, ...] = ()
    """Those of `sampling` as they were given."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that stay in the text nevertheless."""
    reasoning: Reasoning | None = None
    """How the output writes reasoning, in which no stop string counts; None where all of it is the answer."""
    logprobs: bool = True
    """Whether log probabilities of output tokens are computed; otherwise `Token.logprob` is 0."""
    num_alternatives: int = 0
    """Number of most likely tokens that are returned with each output token."""
    alternative_ids: tuple[int, ...] = ()
    """Tokens that are returned with each output token instead of the most likely ones."""
    prefill_logprobs: bool = False
    num_prefill_alternatives: int = 0
    prefill_ranks: bool = False
    """Whether the ranks of prompt tokens are returned with their log probabilities."""
    raw_logprobs: bool = False
    """Log probabilities of the model's own logits (OpenAI) instead of the distribution sampled from (LoRAX)."""
    request_id: str = ""
    priority: int = 0
    """Priority among the waiting requests of one flow: lower values are sent first."""
    caller: str = ""
    """The identity of who sent it: callers take turns."""
    cache_salt: str = ""
    tenant: str = ""
    """An opaque id of the requests whose outputs are proposed as drafts to each other; empty for none."""
    learning_tenant: str = ""
    """The same of requests from whose outputs heads are learned that draft for them."""
    adapter: Adapter | None = None
    """None for the base model."""
    heads: Heads | None = None
    """None for the heads of the adapter itself, if it has any."""
    speculation: Speculation = NO_SPECULATION
    grammar: Grammar | None = None
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
            "min_tokens": self.min_tokens,
        }
        return [name for name, value in masks.items() if value]


@dataclass(slots=True)
class Token:
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
    alternatives: list[tuple[int, str, float]] | None = None
    hidden: bool = False
    """Whether its text is left out of the generated text."""
    num_earlier: int = 0
    """Characters at the start of its text that are an incomplete character of earlier tokens: never left out."""


@dataclass(slots=True)
class Chunk:
    """What was added to a generation since the previous chunk."""

    tokens: list[Token]
    text: str
    """Text that can be shown (held back while it could be the beginning of a stop string)."""
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    prefill: list[tuple[int, str, float | None]] | None = None
    """Prompt tokens with log probabilities, in the first chunk, where requested."""
    prefill_alternatives: list[list[tuple[int, str, float]]] | None = None
    prefill_ranks: list[int] | None = None
    """Ranks of the prompt tokens from the second on; 1 is the likeliest token."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the output; None at an end-of-text token or the maximum length."""

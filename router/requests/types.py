"""The seam between the HTTP routes and the engine room: what a route asks for and what it gets back, token by token.

Knows tokens and text, not HTTP and not the wire.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from lorikeet.router.requests.adapter_ref import Adapter, Heads


class FinishReason(Enum):
    """Why a generation ended, in LoRAX's words (`details.finish_reason`)."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; field for field the wire's Sampling message."""

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


@dataclass(frozen=True)
class Speculation:
    """How far ahead is guessed; the words of the wire."""

    method: str = "off"
    num_tokens: int = 0
    """Drafts of a step at most, of lookup and of a draft model."""
    num_heads: int = 0
    """Guesses of heads in a step at most."""
    schedule: str = ""
    verify: str = "shared-noise"
    needs_heads: bool = False
    """Whether the request asked for heads by name, and is refused without."""
    prediction_ids: tuple[int, ...] = ()
    """A text that the output may repeat."""

    def is_possible(self, has_heads: bool) -> bool:
        """Whether anything can be guessed for a request whose adapter brings heads, or does not."""
        return self.num_tokens > 0 or (self.num_heads > 0 and has_heads)


NO_SPECULATION = Speculation()
ALL_HEADS = 255
"""As many guesses of heads as there are heads."""


class Source(IntEnum):
    """Where a token came from; the values of the wire, the names as they are shown."""

    PREFILL = 0
    TARGET = 1
    LOOKUP = 2
    MEDUSA = 3
    DRAFT = 4
    RESAMPLE = 5
    BONUS = 6


SOURCE_NAMES = tuple(source.name.lower() for source in Source)
ACCEPTED = frozenset({Source.LOOKUP, Source.MEDUSA, Source.DRAFT})
"""Of tokens that were guessed."""


@dataclass(frozen=True)
class GenerationRequest:
    """One text to generate, checked and tokenized."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int
    text: str = field(default="", repr=False)
    """The prompt before it was tokenized; empty where it came as token ids and nobody is told of texts."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True
    """Whether the stop string stays in the text (LoRAX) or is cut off (OpenAI)."""
    ignore_eos: bool = False
    logprobs: bool = True
    """Whether anyone reads the log probability of each token; without, `Token.logprob` is 0."""
    num_alternatives: int = 0
    """So many most likely tokens beside each emitted one."""
    prefill_logprobs: bool = False
    num_prefill_alternatives: int = 0
    raw_logprobs: bool = False
    """Log probabilities of the model's own logits (OpenAI) instead of the law drawn from (LoRAX)."""
    group_id: str = ""
    request_id: str = ""
    cache_salt: str = ""
    adapter: Adapter | None = None
    """None for the bare base model."""
    heads: Heads | None = None
    """None for the adapter's own, if it brings any."""
    speculation: Speculation = NO_SPECULATION
    receipt: bool = False
    """Whether the answer tells what the text follows from."""
    is_probe: bool = False
    """Whether its token is nobody's text: of a probe, or of a prompt that is only scored."""


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
    """A Source."""
    alternatives: list[tuple[int, str, float]] | None = None


@dataclass(slots=True)
class Chunk:
    """What one message from the shard added to one generation."""

    tokens: list[Token]
    text: str
    """Visible text that may be shown now (held back while it could be the start of a stop string)."""
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    prefill: list[tuple[int, str, float | None]] | None = None
    """Prompt tokens with log probabilities, in the first chunk, when asked for."""
    prefill_alternatives: list[list[tuple[int, str, float]]] | None = None

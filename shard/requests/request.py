"""A request, why it ended, and its part of a step.

A request has known tokens (prompt and output) and a count of computed ones; a step makes the second catch up with
the first. There is no prefill or decode phase. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.params import NO_SPECULATION, Composition, Grammar, LogprobParams, SamplingParams, Speculation
from lorikeet.shard.speculation.costs import Load
from lorikeet.shard.speculation.states import NO_STATE


class Unconstrained:
    """What the output of a request is constrained to, here to nothing: the base class of constraints."""

    is_ready = True
    """Whether the request may run."""
    is_constrained = False
    """Whether the next token's distribution depends on all tokens before it, so that they must be known to the host."""
    proposes = False
    """Whether the tokens that must follow are proposed as drafts."""
    is_slow = False
    """Whether threads take in its tokens between steps, so that no step waits; the request then has no drafts."""
    error = ""
    """Why no further token can be computed."""
    may_be_shared = False
    """Whether the error may have been caused by other requests of the same grammar."""
    is_complete = False
    """Whether no further token may follow."""

    def start(self) -> bool:
        """Take in the output of an earlier run, or the newest tokens. Returns whether that is done, or has failed with
        an `error`.
        """
        return True

    def num_allowed(self, draft_ids: Sequence[int]) -> int:
        """How many of the draft tokens may follow the committed tokens."""
        return len(draft_ids)

    def forced_ids(self) -> list[int]:
        """The only tokens that may follow the committed ones, or those that probably do."""
        return []

    def commit(self, token_id: int) -> bool:
        """Take in a committed token. Returns whether the output is complete."""
        return False


UNCONSTRAINED = Unconstrained()


class FinishReason(IntEnum):
    """Why a request ended, in the wire's values. The router's enumeration has LoRAX's words; both are named after the
    field that users read.
    """

    NONE = pb.FINISH_NONE
    LENGTH = pb.FINISH_LENGTH
    EOS = pb.FINISH_EOS
    ABORTED = pb.FINISH_ABORTED
    DEADLINE = pb.FINISH_DEADLINE
    ERROR = pb.FINISH_ERROR


class Source(IntEnum):
    """Where an emitted token came from."""

    PREFILL = pb.SOURCE_PREFILL
    TARGET = pb.SOURCE_TARGET
    LOOKUP = pb.SOURCE_LOOKUP
    MEDUSA = pb.SOURCE_MEDUSA
    DRAFT = pb.SOURCE_DRAFT
    RESAMPLE = pb.SOURCE_RESAMPLE
    BONUS = pb.SOURCE_BONUS
    GRAMMAR = pb.SOURCE_GRAMMAR
    HISTORY = pb.SOURCE_HISTORY


class Rows(Enum):
    """Which hidden states of a prompt are wanted."""

    FIRST = "first"
    LAST = "last"
    """Hidden state of the last token, or the mean of all: that is known at the last token."""
    ALL = "all"


class PooledRows(NamedTuple):
    """The rows of hidden states that make what a request ends with in place of tokens."""

    rows: Rows
    second_text: int = 0
    """Index of the first token of the second text of a pair, 0 for a single text."""

    @property
    def per_token(self) -> bool:
        """Whether every token has a result of its own."""
        return self.rows is Rows.ALL


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the shard. The submitter fills the first part; scheduler and page table own the rest."""

    key: tuple[int, int]
    """(stream epoch, id within the stream)."""
    token_ids: list[int]
    """Known tokens: prompt, then output as it is committed."""
    num_prompt: int
    """Tokens of `token_ids` that are the prompt proper."""
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    """What its output follows."""
    constraint: Unconstrained = UNCONSTRAINED
    """The same for tokens."""
    adapter_digest: str = ""
    composition: Composition | None = None
    """The adapters whose sum `adapter_digest` stands for, None for a single one."""
    num_virtual: int = 0
    """Leading tokens that are the adapter's virtual ones, with ids from FIRST_VIRTUAL_ID on."""
    adapter_start: int = 0
    """Position of the first token that the adapter applies to: those before it are the base model's (aLoRA)."""
    heads_digest: str = ""
    """Content whose Medusa heads draft for the request, "" for those of its adapter."""
    given_heads_digest: str = ""
    """The same as the router sent it: learned heads replace those."""
    learner: str = ""
    """Heads learned from the outputs of a learner with one adapter draft for its requests; "" for none."""
    cache_salt: str = ""
    tenant: str = ""
    """Requests of one tenant with one adapter get each other's outputs as drafts; "" for none."""
    caller: str = ""
    """Who has a share of the shard with this request."""
    share: float = 1.0
    """The caller's weight next to other callers."""
    num_held: int = 0
    """Further requests of the caller that waited in the router then."""
    deadline: float | None = None
    """time.monotonic() at which the request ends, or None."""
    speculation: Speculation = NO_SPECULATION
    isolation_steps: int = 0
    """Further steps that give tokens and compute no other request, because this one may have crashed a shard."""
    pooling: PooledRows | None = None
    """Set for a request that ends with a vector or scores. To the scheduler they are its only token."""

    finish_reason: FinishReason = FinishReason.NONE
    order: int = 0
    """First come, first served: lower goes first."""
    admission: int = 0
    """Number of its newest admission: running requests are in this order."""
    row: int = -1
    """Index of the request's row of device state, -1 while it waits."""
    slot: int = -1
    """The adapter's slot while the request runs, -1 for the bare base."""
    page_ids: list[int] = field(default_factory=list)
    """KV pages in the order of positions."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the leading full pages, computed as needed."""
    heads_slot: int = -1
    """Slot of the request's Medusa heads while it runs, -1 without."""
    num_heads: int = 0
    """Number of the request's Medusa heads."""
    head_ids: Sequence[int] = ()
    """The heads' draft tokens after the newest committed token."""
    num_computed: int = 0
    """Tokens whose KV is computed or being computed by a launched step."""
    num_committed: int = 0
    """Tokens whose KV is computed by committed steps."""
    num_draft_computed: int = 0
    """Tokens whose KV of the draft model is computed or being computed by a launched step."""
    num_published: int = 0
    """Leading pages that were offered to the prefix cache."""
    num_in_flight: int = 0
    """Tokens being sampled by launched steps, not yet in `token_ids`."""
    is_fresh: bool = True
    """Whether nothing was sampled since the request got its pages: the first token then comes without drafts."""
    is_draft: bool = False
    """Whether a launched step has drafts of this request, so that its number of accepted tokens is not known yet."""
    num_launched: int = 0
    """Launched steps, not yet committed, that write this request's pages."""
    drafts_on_device: bool = False
    """Whether the device makes its drafts: the next step is then launched before the tokens of the last one are known.
    """
    match_length: int = 1
    """Tokens of the match that prompt lookup continues on the device, after the newest committed step. One until a step
    with its result is committed."""
    is_decoding: bool = False
    """Whether its counts are those of `scheduler/decoding.py`: the ones here are then behind."""
    num_charged: int = 0
    """Tokens that the caller was charged for while the request runs."""
    num_scored: int = 0
    """Leading prompt positions whose prompt log probability has been emitted."""
    num_cached: int | None = None
    """Prompt tokens that came from the prefix cache at first admission and are yet to be reported; None before it."""
    awaited_hash: bytes | None = None
    """Hash of the page that another request is computing and this one waits for."""

    @property
    def digests(self) -> tuple[str, ...]:
        """What must be in slots while the request runs: its adapter or those of its sum, and the heads of another."""
        heads = self.heads_digest
        if self.composition is not None:
            adapters = tuple(dict.fromkeys(self.composition.digests))
        else:
            adapters = (self.adapter_digest,) if self.adapter_digest else ()
        return (*adapters, heads) if heads and heads not in adapters and self.speculation.takes_heads else adapters

    @property
    def num_output(self) -> int:
        """Committed output tokens, those of an earlier run included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_known(self) -> int:
        """Tokens committed or being sampled; the next step's KV catches up with these."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_shareable(self) -> int:
        """Leading tokens that may come from a prefix hit: the last known token is computed for its logits, and a
        prompt whose log probabilities are wanted is computed from the first one not yet emitted.
        """
        if self.logprobs.prefill and self.num_scored < self.num_prompt - 1:
            return self.num_scored
        return len(self.token_ids) - 1


@dataclass(slots=True)
class ScheduledRequest:
    """The tokens at positions `start` … `end - 1` of a request, and the draft tokens after them."""

    request: Request
    start: int
    end: int
    """The position after the last token; where the step samples, that of the sampled token."""
    samples: bool
    """Whether the step ends at the newest known token, so that the next one is sampled."""
    draft_ids: Sequence[int] = ()
    """Draft tokens from position `end` on: computed along, and kept as far as the target agrees. Of a draft model only
    their number is planned: it draws them in the step itself; of drafts that the device makes too, and they are known
    with the step's result.
    """
    source: int = Source.TARGET
    """What proposed them."""
    draft_state: int = NO_STATE
    """Row of `DraftStates` by which their number was chosen; NO_STATE with a constant schedule."""
    draft_start: int = 0
    draft_end: int = 0
    """The draft model takes in the request's tokens from `draft_start` up to `draft_end` before it drafts."""
    num_heads: int = 0
    """Draft tokens of heads that are wanted after each sampled token."""
    num_uncertain: int = 0
    """Draft tokens of the step before, if it is not committed. `start` and `end` are what they are if it accepts none;
    the device adds the number that it accepts.
    """
    is_on_device: bool = False
    """Whether the device made its draft tokens."""
    match_length: int | None = None
    """`Request.match_length` after the step, once it is known."""
    next: "ScheduledRequest | None" = None
    """The request's part of the step after, if that was launched before this one's result was known."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start + len(self.draft_ids)

    @property
    def num_sampled(self) -> int:
        """Positions at which the target samples a token."""
        return (1 + len(self.draft_ids)) if self.samples and self.request.pooling is None else 0

    @property
    def num_drawn(self) -> int:
        """Draft tokens that the draft model draws."""
        return len(self.draft_ids) if self.source == Source.DRAFT else 0

    @property
    def is_decode(self) -> bool:
        """Whether this is the newest token alone, known to what makes drafts: these may follow only such a one."""
        request = self.request
        if not self.samples or self.end - self.start > 1:
            return False
        if request.drafts_on_device:
            return not request.is_fresh or request.num_in_flight > 1
        return self.end == len(request.token_ids) and not request.is_fresh

    @property
    def end_of_pages(self) -> int:
        """Tokens that the request's pages must hold for this step."""
        return self.end + self.num_uncertain + len(self.draft_ids)

    def expect_heads(self, num_heads: int) -> None:
        """Heads give so many draft tokens after each sampled token. Where the device takes them, the next step may have
        them before the host knows them.
        """
        self.num_heads = num_heads
        if self.request.drafts_on_device and num_heads:
            self.request.head_ids = self.request.head_ids or [0] * num_heads

    def settle(self, num_accepted: int) -> None:
        """The step before accepted this number of drafts."""
        self.start += num_accepted
        self.end += num_accepted
        self.num_uncertain = 0


def load_of(step: Sequence[ScheduledRequest]) -> Load:
    """What a step computes, its drafts included."""
    num_sampling = num_tokens = num_attended = 0
    for item in step:  # one loop without properties: each step sums several times
        count = item.end - item.start + len(item.draft_ids)
        num_sampling += item.samples
        num_tokens += count
        num_attended += count * (2 * item.start + 1 + count) // 2  # a token attends to itself and those before it
    return Load(num_sampling, num_tokens, num_attended)

"""One request's part of a step. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from lorikeet.shard.requests.request import Request, Source
from lorikeet.shard.speculation.acceptance import DraftState
from lorikeet.shard.speculation.throughput import Load


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
    draft_state: DraftState | None = None
    """What chose their number; None with a constant schedule."""
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
    def num_attended(self) -> int:
        """Positions that each of the tokens attends to, summed over them."""
        return self.num_tokens * (self.start + 1 + self.end + len(self.draft_ids)) // 2

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

    def settle(self, num_accepted: int) -> None:
        """The step before accepted this number of drafts."""
        self.start += num_accepted
        self.end += num_accepted
        self.num_uncertain = 0


def load_of(step: Sequence[ScheduledRequest]) -> Load:
    """What a step computes, its drafts included."""
    num_tokens, num_attended = sum(item.num_tokens for item in step), sum(item.num_attended for item in step)
    return Load(sum(item.samples for item in step), num_tokens, num_attended)

"""Statistics of speculative decoding for one request, accumulated from the outputs of its shards."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from lorikeet.proto import shard_pb2 as pb
from lorikeet.proto.draft_sources import BY_VALUE


def is_verified(source: int) -> bool:
    """Whether a token with this source is of a step that verified draft tokens."""
    return source in (pb.SOURCE_RESAMPLE, pb.SOURCE_BONUS) or source in BY_VALUE


@dataclass(slots=True)
class SpeculationStats:
    """Speculation counts of one request that may speculate, over all shards that it ran on."""

    num_drafted: int = 0
    """Draft tokens that were verified."""
    num_accepted: int = 0
    """Accepted draft tokens that are in the text."""
    sources: Counter[int] = field(default_factory=Counter)
    """Tokens of the text by their source."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps that verified draft tokens, by the number of those that are in the text."""
    draft_seconds: float = 0.0
    """Seconds of proposing in the steps that verified drafts of the request."""
    verify_seconds: float = 0.0
    """Seconds of the target's forward passes in these steps."""
    accept_seconds: float = 0.0
    """Seconds of sampling with acceptance in these steps."""

    def take(self, output: pb.RequestOutput, num_kept: int) -> None:
        """Add an output whose first `num_kept` tokens are in the text."""
        self.sources.update(output.sources[:num_kept])
        if not output.num_drafted:
            return
        self.num_drafted += sum(output.num_drafted)
        self.num_accepted += num_emitted(output, num_kept)
        self.steps.update(_accepted_by_step(output, num_kept))
        self.draft_seconds += output.draft_seconds
        self.verify_seconds += output.verify_seconds
        self.accept_seconds += output.accept_seconds


def _accepted_by_step(output: pb.RequestOutput, num_kept: int) -> Iterator[int]:
    """Accepted draft tokens of each step that verified some: all of its tokens but the model's own at its end."""
    num_tokens = 0
    for index, source in enumerate(output.sources[:num_kept]):
        num_tokens += 1
        if output.step_ends[index] or index + 1 == num_kept:
            if is_verified(source):
                yield num_tokens - (source not in BY_VALUE)
            num_tokens = 0


def num_emitted(output: pb.RequestOutput, num_kept: int) -> int:
    """Accepted draft tokens among the first `num_kept` tokens of an output.

    Derived from the shard's count, because an accepted draft token that is the first output token has the source
    `prefill`.
    """
    return output.num_accepted - sum(source in BY_VALUE for source in output.sources[num_kept:])

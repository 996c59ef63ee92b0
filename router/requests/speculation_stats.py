"""What guessing ahead gave one request, added up as its shard tells of steps. Knows the wire's counts and no HTTP."""

from collections import Counter
from dataclasses import dataclass, field

from lorikeet.proto import shard_pb2 as pb
from lorikeet.router.requests.types import ACCEPTED


@dataclass(slots=True)
class SpeculationStats:
    """Of one request that could speculate, wherever its steps ran."""

    num_drafted: int = 0
    """Tokens that were guessed and verified …"""
    num_accepted: int = 0
    """… and those of them that are in its text."""
    sources: Counter[int] = field(default_factory=Counter)
    """Tokens of its text by their Source."""
    draft_seconds: float = 0.0
    """Proposing, in the steps that verified its drafts …"""
    verify_seconds: float = 0.0
    """… the target's forward …"""
    accept_seconds: float = 0.0
    """… and sampling with acceptance."""

    def take(self, output: pb.RequestOutput, num_kept: int) -> None:
        """What a message says, of whose tokens the first `num_kept` are in the text."""
        self.sources.update(output.sources[:num_kept])
        if not output.num_drafted:
            return
        self.num_drafted += sum(output.num_drafted)
        self.num_accepted += num_emitted(output, num_kept)
        self.draft_seconds += output.draft_seconds
        self.verify_seconds += output.verify_seconds
        self.accept_seconds += output.accept_seconds


def num_emitted(output: pb.RequestOutput, num_kept: int) -> int:
    """Accepted drafts among the first `num_kept` tokens of a message.

    Taken from the shard's count, since an accepted draft that is the first token of all is told as `prefill`.
    """
    return output.num_accepted - sum(source in ACCEPTED for source in output.sources[num_kept:])

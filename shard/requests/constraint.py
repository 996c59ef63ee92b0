"""What the output of a request is constrained to. Imports no torch."""

from collections.abc import Sequence

from lorikeet.proto.params import Grammar


class Unconstrained:
    """Any token may follow any other. The base class of constraints."""

    is_ready = True
    """Whether the request may run."""
    is_constrained = False
    """Whether the next token's distribution depends on all tokens before it, so that they must be known to the host."""
    proposes = False
    """Whether the tokens that must follow are proposed as drafts."""
    error = ""
    """Why no further token can be computed."""
    may_be_shared = False
    """Whether the error may have been caused by other requests of the same grammar."""
    is_complete = False
    """Whether no further token may follow."""

    def start(self) -> bool:
        """Begin after the output of an earlier run. Returns whether that is done, or has failed with an `error`."""
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


class NoGrammars:
    """The compiler of a shard that cannot compile grammars. The base class of compilers."""

    reject_reason = "this shard takes no grammars: its model has no fast tokenizer (tokenizer.json)"

    def match(self, grammar: Grammar, output_ids: Sequence[int] = (), is_private: bool = False) -> Unconstrained:
        """The constraint of a request that has some output, shared with no other if it is private. Never waits."""
        return UNCONSTRAINED

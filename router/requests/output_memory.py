"""Memory of outputs: what clients have not read, and what is kept until an answer is complete.

Sizes are estimates of the objects, from their numbers.
"""

from lorikeet.router.errors import AnswerTooLarge

TOKEN_BYTES, ALTERNATIVE_BYTES, SCORE_BYTES = 256, 160, 32
MAX_UNREAD_BYTES = 1 << 20
"""Output of one sequence that its reader has not taken: above it the sequence leaves its shard until it is read."""
LEAST_UNREAD_BYTES = 64 << 10
"""The same while all outputs together take more than half of MAX_BYTES."""
MAX_ANSWER_BYTES = 64 << 20
"""Output of one sequence that is kept until its answer is complete: above it the request fails."""
MAX_BYTES = 256 << 20
"""Outputs of all sequences: above it, a sequence with more than LEAST_KEPT_BYTES fails when it gets more."""
LEAST_KEPT_BYTES = 4 << 20
SMALL_BYTES = 16 << 10
"""Output of one sequence that is within every limit."""


class OutputMemory:
    """The memory of all outputs that one router holds."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def is_too_much_unread(self, num_bytes: int) -> bool:
        """Whether a sequence with so much unread output has to wait for its reader."""
        return num_bytes > (LEAST_UNREAD_BYTES if self.num_bytes > MAX_BYTES // 2 else MAX_UNREAD_BYTES)

    def failure(self, num_bytes: int) -> AnswerTooLarge | None:
        """Why a sequence that takes so much cannot go on."""
        if num_bytes > MAX_ANSWER_BYTES:
            return AnswerTooLarge(f"{MAX_ANSWER_BYTES >> 20} MiB")
        if self.num_bytes > MAX_BYTES and num_bytes > LEAST_KEPT_BYTES:
            return AnswerTooLarge(
                f"{LEAST_KEPT_BYTES >> 20} MiB while all answers together take more than {MAX_BYTES >> 20} MiB"
            )
        return None


class OutputCharge:
    """The part of one sequence."""

    def __init__(self, memory: OutputMemory) -> None:
        self._memory = memory
        self.num_unread = 0
        self._num_kept = 0
        self._is_released = False

    def arrived(self, num_tokens: int, num_alternatives: int, num_scores: int, num_pooled: int) -> None:
        """An output was taken: `num_scores` log probabilities and ranks of a prompt, `num_pooled` bytes of vectors."""
        num_bytes = TOKEN_BYTES * num_tokens + ALTERNATIVE_BYTES * num_alternatives
        num_bytes += SCORE_BYTES * num_scores + num_pooled
        if not self._is_released:
            self.num_unread += num_bytes
            self._memory.num_bytes += num_bytes

    def token_arrived(self) -> None:
        """As `arrived`, of one token without alternatives."""
        if not self._is_released:
            self.num_unread += TOKEN_BYTES
            self._memory.num_bytes += TOKEN_BYTES

    @property
    def is_too_much_unread(self) -> bool:
        """Whether the sequence has to wait for its reader."""
        return self._memory.is_too_much_unread(self.num_unread)

    def read(self) -> int:
        """The reader has taken everything; returns how much that was."""
        num_bytes, self.num_unread = self.num_unread, 0
        self._memory.num_bytes -= num_bytes
        return num_bytes

    @property
    def num_bytes(self) -> int:
        """Everything that it takes."""
        return self.num_unread + self._num_kept

    def keep(self, num_bytes: int) -> None:
        """What was read stays in memory until the request ends. Raises AnswerTooLarge."""
        if not self._is_released:
            self._num_kept += num_bytes
            self._memory.num_bytes += num_bytes
            if (failure := self.failure()) is not None:
                raise failure

    def failure(self) -> AnswerTooLarge | None:
        """Why the sequence cannot go on, if it cannot."""
        return self._memory.failure(self.num_bytes)

    def release(self) -> None:
        """The request is over."""
        self._memory.num_bytes -= self.num_bytes
        self.num_unread = self._num_kept = 0
        self._is_released = True

"""The remaining capacity of a shard: its last reported credit less the requests that it had not counted yet.

A pure state machine; ids and credit belong to one stream.
"""

from collections import deque


class CreditAccount:
    """Requests and KV tokens that one shard could start within its next few steps."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_kv_tokens = 0
        self.known = False
        """Whether the shard has reported credit on this stream."""
        self._num_acknowledged = 0
        self._unseen: deque[int] = deque()
        """KV tokens of each request that the shard had not counted yet, oldest first."""

    def sent(self, num_tokens: int) -> None:
        """A request with a prompt of `num_tokens` was sent."""
        self._unseen.append(num_tokens)
        self.num_requests -= 1
        self.num_kv_tokens -= num_tokens

    def update(self, num_requests: int, num_kv_tokens: int, acknowledged: int) -> None:
        """The shard's report, which counts the first `acknowledged` requests of this stream."""
        for _ in range(min(acknowledged - self._num_acknowledged, len(self._unseen))):
            self._unseen.popleft()
        self._num_acknowledged = max(self._num_acknowledged, acknowledged)
        self.num_requests = num_requests - len(self._unseen)
        self.num_kv_tokens = num_kv_tokens - sum(self._unseen)
        self.known = True

    @property
    def num_unseen(self) -> int:
        return len(self._unseen)

    def covers(self, num_tokens: int) -> bool:
        """Whether a request with a prompt of `num_tokens` could start."""
        return self.num_requests > 0 and self.num_kv_tokens >= num_tokens

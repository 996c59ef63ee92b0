"""Smaller steps for a while after one that ran out of device memory. Imports no torch."""

CALM_STEPS = 32
"""Steps that must succeed before they may be twice as large."""


class OomBackoff:
    """How large a step may be now."""

    def __init__(self, step_tokens: int, max_running: int, is_chunked: bool = True) -> None:
        """The limits without any backoff. `is_chunked`: whether a prompt may be computed over several steps."""
        self._most = (step_tokens, max_running)
        self._is_chunked = is_chunked
        self.step_tokens, self.max_running = self._most
        self._num_calm = 0

    @property
    def is_active(self) -> bool:
        """Whether steps are smaller than the limits."""
        return (self.step_tokens, self.max_running) != self._most

    def on_oom(self, num_tokens: int, num_requests: int) -> bool:
        """A step of this size was too large: halve the next ones. False where no step is smaller."""
        self._num_calm = 0
        if num_requests == 1 and (num_tokens == 1 or not self._is_chunked):
            return False
        self.step_tokens = max(1, min(self.step_tokens, num_tokens // 2))
        self.max_running = max(1, min(self.max_running, num_requests // 2))
        return True

    def on_success(self) -> None:
        """A step succeeded."""
        if not self.is_active:
            return
        self._num_calm += 1
        if self._num_calm == CALM_STEPS:
            self._num_calm = 0
            step_tokens, max_running = self._most
            self.step_tokens = min(2 * self.step_tokens, step_tokens)
            self.max_running = min(2 * self.max_running, max_running)

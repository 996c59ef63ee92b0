"""Smaller steps for a while, after one that the device had no memory for. Imports no torch, reads no clock."""

CALM_STEPS = 32
"""Steps that must go well before they may be twice as large."""


class OomBackoff:
    """How large a step may be just now."""

    def __init__(self, step_tokens: int, max_running: int, is_chunked: bool = True) -> None:
        """Of a step without any restraint. `is_chunked`: whether a prompt may be computed over several steps."""
        self._most = (step_tokens, max_running)
        self._is_chunked = is_chunked
        self.step_tokens, self.max_running = self._most
        self._num_calm = 0

    @property
    def is_active(self) -> bool:
        """Whether steps are smaller than they might be."""
        return (self.step_tokens, self.max_running) != self._most

    def failed(self, num_tokens: int, num_requests: int) -> bool:
        """A step of so many was too large: the next ones are half as large. False where there is nothing smaller."""
        self._num_calm = 0
        if num_requests == 1 and (num_tokens == 1 or not self._is_chunked):
            return False
        self.step_tokens = max(1, min(self.step_tokens, num_tokens // 2))
        self.max_running = max(1, min(self.max_running, num_requests // 2))
        return True

    def passed(self) -> None:
        """A step went well."""
        if not self.is_active:
            return
        self._num_calm += 1
        if self._num_calm == CALM_STEPS:
            self._num_calm = 0
            self.step_tokens, self.max_running = (
                min(2 * now, most) for now, most in zip((self.step_tokens, self.max_running), self._most, strict=True)
            )

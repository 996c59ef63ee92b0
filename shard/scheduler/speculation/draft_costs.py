"""What a draft model's passes cost by the number of requests that it guesses for, as measured in the shard itself."""

import numpy as np
import numpy.typing as npt

from lorikeet.shard.scheduler.speculation.costs import StepCosts


class DraftCosts:
    """The first pass of a step, which takes in what was verified before it and finds the draft model's weights out of
    all caches, and those behind it: a mean of both would make every deeper guess look dearer than it is, the more so
    the fewer are taken.
    """

    def __init__(self) -> None:
        self.first, self.further = StepCosts(), StepCosts()

    def observe(self, num_drawn: int, num_attended: int, seconds: tuple[float, float], num_passes: int) -> None:
        """Of a step with guesses for so many requests: what its first pass took, and all others together."""
        first, further = seconds
        if first > 0:
            self.first.observe(num_drawn, num_attended, first)
        if num_passes > 1 and further > 0:
            self.further.observe(num_drawn, num_attended, further / (num_passes - 1))

    def expected(self, num_drawn: int, num_attended: int, most: int) -> npt.NDArray[np.float64]:
        """[most + 1] seconds of none, of one, … of so many passes; each attends to as many positions. Nothing where
        nothing was seen.
        """
        if not (num_drawn and self.first.is_known):
            return np.zeros(most + 1)
        first, further = (
            float(costs.expected([num_drawn])[0]) + costs.per_attended * num_attended
            for costs in (self.first, self.further if self.further.is_known else self.first)
        )
        passes = np.arange(most + 1)
        return np.minimum(passes, 1) * first + np.maximum(passes - 1, 0) * further

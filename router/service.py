"""What every route is handed: the parts of the router, and the short ways through them that routes share."""

import secrets
import time
from dataclasses import dataclass

from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.generation import FinishReason, GenerationRequest
from router.inflight import Generation
from router.metrics import Metrics
from router.text.tokenizer import Tokenizer


@dataclass
class Timing:
    """When a request passed the stations before the queue."""

    arrived_at: float
    validated_at: float = 0.0


@dataclass(frozen=True)
class Service:
    """The parts, made once per process."""

    dispatcher: Dispatcher
    tokenizer: Tokenizer
    config: RouterConfig
    metrics: Metrics

    def validated(self, timing: Timing) -> None:
        """The request is checked and tokenized."""
        timing.validated_at = now()
        self.metrics.request_validated(timing.validated_at - timing.arrived_at)

    def submit(self, requests: list[GenerationRequest], arrived_at: float) -> list[Generation]:
        """Queue all of `requests` or none of them. Raises a leaf of Refused."""
        limit = self.config.request_timeout_s
        deadline = None if limit is None else arrived_at + limit
        generations: list[Generation] = []
        try:
            for request in requests:
                generations.append(self.dispatcher.submit(request, deadline=deadline))
        except BaseException:
            cancel_all(generations)
            raise
        return generations


def cancel_all(generations: list[Generation]) -> None:
    """End what still runs; a finished generation does not mind."""
    for generation in generations:
        generation.cancel()


def now() -> float:
    """The clock of deadlines and timings."""
    return time.monotonic()


def told(request: GenerationRequest, num_generated: int, finish: FinishReason) -> dict[str, int | str]:
    """What the log says of a request that was answered: numbers only."""
    return {
        "prompt_tokens": len(request.prompt_ids),
        "generated_tokens": num_generated,
        "finish_reason": finish.value,
    }


def random_seed() -> int:
    """For a request that named none. 53 bits survive every JSON reader."""
    return secrets.randbits(53)

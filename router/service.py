"""What every route is handed: the parts of the router, and the short ways through them that routes share."""

import secrets
import time
from dataclasses import dataclass

from starlette.requests import Request

from adapters.rights import Rights
from adapters.sources.registry import Sources
from router.adapter import Adapter
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.generation import FinishReason, GenerationRequest
from router.inflight import Generation
from router.metrics import Metrics
from router.schemas.adapters import AdapterFields
from router.selection import Selection
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
    selection: Selection

    async def adapter(self, request: Request, fields: AdapterFields) -> Adapter | None:
        """The adapter that the request asks for; None is the bare base model. Raises RouterError."""
        return await self.selection.choose(fields, bearer(request))

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

    async def submit_named(self, request: GenerationRequest, arrived_at: float) -> Generation:
        """Queue one request, and wait until it is known what its adapter holds. Raises RouterError."""
        [generation] = self.submit([request], arrived_at)
        await named([generation])
        return generation


def select_from(config: RouterConfig) -> Selection:
    """How this server chooses adapters."""
    if config.loader_address is None:
        return Selection(config, None)
    return Selection(config, Rights(Sources(config.sources), config.auth_cache_ttl_s, config.auth_stale_s))


def bearer(request: Request) -> str | None:
    """The token of the Authorization header."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


async def named(generations: list[Generation]) -> None:
    """Wait until it is known what their adapter holds. When that fails all are ended."""
    try:
        for generation in generations:
            await generation.named()
    except BaseException:
        cancel_all(generations)
        raise


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

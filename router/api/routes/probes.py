"""Liveness, readiness and startup probes: `/health`, `/ping`, `/`, `/ready`, `/startup`."""

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.collect import collect
from lorikeet.router.api.disconnect import ClientWatch
from lorikeet.router.api.service import Service, now
from lorikeet.router.errors import Failed, Refused, ShuttingDown, Unhealthy
from lorikeet.router.requests.types import GenerationRequest


class ProbeRoutes:
    """200 with an empty body, or 503 with the reason."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """200 while draining too, since running requests are still answered."""
        if not self._service.dispatcher.healthy:
            raise Unhealthy()
        return Response()

    async def ready(self, request: Request) -> Response:
        """Whether new requests are accepted."""
        self._check()
        return Response()

    async def startup(self, request: Request) -> Response:
        """Generates one token end to end."""
        self._check()
        prompt_ids = await self._service.tokenizer.encode("Who?")
        probe = GenerationRequest(
            prompt_ids, max_new_tokens=1, seed=0, request_id=request.state.request_id, is_probe=True
        )
        try:
            async with ClientWatch(request.receive):
                [generation] = self._service.submit(request, [probe], now())
                try:
                    await collect(generation)
                finally:
                    generation.cancel()
        except (Failed, Refused) as error:
            raise (error if isinstance(error, ShuttingDown) else Unhealthy()) from error
        return Response()

    def _check(self) -> None:
        if self._service.dispatcher.draining:
            raise ShuttingDown()
        if not self._service.dispatcher.ready or not self._service.adapters_checked:
            raise Unhealthy()

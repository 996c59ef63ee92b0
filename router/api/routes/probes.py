"""Whether the server lives, can answer, and has answered: `/health`, `/ping`, `/`, `/ready`, `/startup`."""

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.collect import collect
from lorikeet.router.api.disconnect import ClientWatch
from lorikeet.router.api.service import Service, now
from lorikeet.router.errors import Failed, Refused, RouterError, ShuttingDown, Unhealthy
from lorikeet.router.requests.types import GenerationRequest


class ProbeRoutes:
    """200 with an empty body, or 503 with the reason."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """Stays 200 while draining: what runs is still answered."""
        if not self._service.dispatcher.healthy:
            raise Unhealthy()
        return Response()

    async def ready(self, request: Request) -> Response:
        """Whether new requests are welcome."""
        self._check()
        return Response()

    async def startup(self, request: Request) -> Response:
        """Generates one token, all the way through."""
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
            raise _as_unhealthy(error) from error
        return Response()

    def _check(self) -> None:
        if self._service.dispatcher.draining:
            raise ShuttingDown()
        if not self._service.dispatcher.ready or not self._service.settled:
            raise Unhealthy()


def _as_unhealthy(error: RouterError) -> RouterError:
    """A probe knows 200 and 503 only."""
    return error if isinstance(error, ShuttingDown) else Unhealthy()

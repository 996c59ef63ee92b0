"""`/v1/live`: what the server does now, as server-sent events, one in half a second."""

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.api.service import Service
from lorikeet.router.api.sse import EventStream
from lorikeet.router.errors import AdminOnly


class LiveRoutes:
    """The handler. Open where the server has no keys, for administrators where it has."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def watch(self, request: Request) -> Response:
        """Raises AdminOnly."""
        keys = self._service.selection.keys
        if keys.has_admin:
            refusal = AdminOnly("the live view needs the admin key as bearer token")
            self._service.authentication.check_admin(request, refusal)
        elif keys:
            raise AdminOnly("the live view is closed: the server has API keys, but no admin key")
        return EventStream(self._service.live.events(), {"x-accel-buffering": "no"})

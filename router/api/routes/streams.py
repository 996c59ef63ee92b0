"""`/v1/streams/{id}`: the answers of resumable requests, for their own caller."""

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.proto.numbers import whole_number
from lorikeet.router.api.resumable import Replay
from lorikeet.router.api.service import Service
from lorikeet.router.errors import StreamTrimmed, ValidationError
from lorikeet.router.kept_streams import KeptStream, OutOfRange, Trimmed

MAX_EVENTS = 10**15


class StreamRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def read(self, request: Request) -> Response:
        """The answer from event `from` on, and what is added to it. Raises StreamNotFound, StreamTrimmed, …"""
        stream, given = self._stream(request), request.query_params.get("from", "0")
        first_event = whole_number(given, 0, MAX_EVENTS)
        if first_event is None:
            raise ValidationError("`from` must be the number of events that were received", "from")
        try:
            return Replay(stream, first_event)
        except Trimmed as trimmed:
            raise StreamTrimmed(str(trimmed.first)) from None
        except OutOfRange:
            raise ValidationError(
                f"`from` is {first_event}: the stream has {stream.num_events} events", "from"
            ) from None

    async def cancel(self, request: Request) -> Response:
        """End the request, if it runs, and forget its answer."""
        self._service.streams.cancel(self._stream(request))
        return Response(status_code=204)

    def _stream(self, request: Request) -> KeptStream:
        return self._service.streams.find(self._service.caller(request).identity, request.path_params["stream_id"])

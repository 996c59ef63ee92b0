"""Every request that has ended, told wherever the operator wants it: in a file, to a URL, or both."""

from collections.abc import Callable

from starlette.requests import Request

from lorikeet.router.config import RouterConfig
from lorikeet.router.metrics.router import Metrics
from lorikeet.router.requests.caller import Caller
from lorikeet.router.usage.file import UsageFile
from lorikeet.router.usage.post import UsagePost
from lorikeet.router.usage.record import Ending, record
from lorikeet.router.usage.writer import BackgroundWriter

NUM_POSTERS = 4
"""Threads that post, each over a connection of its own: one would be as slow as the answers are far away."""
CLOSE_S = 5.0
"""So long the end of the router waits for what is still to be told."""


class Usage:
    """Of one router. Nothing here waits, and nothing that goes wrong reaches a request."""

    def __init__(self, config: RouterConfig, metrics: Metrics, caller: Callable[[Request], Caller]) -> None:
        """`caller` says who sent a request. Raises OSError or ValueError where a place cannot be written to."""
        url, path = config.request_logger_url, config.usage_log
        posters = [] if url is None else [UsagePost(url) for _ in range(NUM_POSTERS)]
        self._model = config.model_id
        self._caller = caller
        self._file = None if path is None else BackgroundWriter("file", [UsageFile(path)], metrics.usage_dropped)
        self._url = BackgroundWriter("url", posters, metrics.usage_dropped) if posters else None

    def ended(self, request: Request, ending: Ending) -> None:
        """A request has ended, however it did."""
        if self._file is None and self._url is None:
            return
        told = record(request.scope["state"], self._caller(request), ending, self._model)
        if self._file is not None:
            self._file.put(told)
        if self._url is not None and told.generated_tokens:
            self._url.put(told)

    def reopen(self) -> None:
        """The operator has moved the file away."""
        if self._file is not None:
            self._file.reopen()

    def close(self) -> None:
        """Write what waits, then no more. It may take a while."""
        for writer in (self._file, self._url):
            if writer is not None:
                writer.close(CLOSE_S)

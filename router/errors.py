"""The failures of one request: a tree of exceptions. error_answers.py has the HTTP answer of each leaf.

RouterError
├── InvalidRequest              the client can correct it
│   ├── BodyRejected            plain text on LoRAX's routes
│   │   ├── NotJson, WrongJsonType, WrongMediaType, BodyTooLarge, BodyTooDetailed, BodyTimeout
│   │   └── BadContentEncoding, UnsupportedContentEncoding
│   ├── ValidationError         "Input validation error: …"
│   │   ├── TokenInvalid, TooManyTokens
│   │   └── UnsupportedField
│   │       └── NoHeads
│   ├── AdapterProblem          the adapter is missing, forbidden, broken, or unavailable
│   │   └── one leaf per status
│   ├── KeyRequired (TwoCredentials), TooManyFailedKeys, AdminOnly, AlreadyLoaded, ReloadRefused
│   ├── HostNotAllowed, ForeignPage
│   ├── StreamNotFound, StreamExists, StreamTrimmed, ChatTemplateError, ToolError, WrongTask
│   ├── ModelNotFound (LoraNotFound), ResponseNotFound
│   └── UnknownRoute, UnknownMethod
├── Refused                     the server cannot accept it now
│   ├── Overloaded (QueueTimeout), KeyLimitReached, BodyMemoryFull, TooManyStreams
│   └── ShuttingDown, NoShard, ModelLoading, Unhealthy, RouteNotServed
└── Failed                      the request started and failed
    └── GenerationFailed, PoisonRequest, IncompleteGeneration, DeadlineExceeded, AnswerTooLarge, InternalError
"""

from typing import ClassVar

from lorikeet.adapters.errors import AdapterError


class RouterError(Exception):
    """Base of the tree. `str()` is the text that LoRAX's routes show as `error`."""

    template: ClassVar[str] = "{}"
    """Format of the text, given the message."""
    param: str | None = None
    """The request's invalid field, as OpenAI's errors name it."""
    code: str | None = None
    """OpenAI's `code`, where it is not that of the class."""
    retry_after: float | None = None
    """Seconds after which another attempt may succeed."""

    def __init__(self, message: str = "", param: str | None = None, code: str | None = None) -> None:
        self.message = message
        self.param = param or self.param
        self.code = code
        super().__init__(self.template.format(message))


class InvalidRequest(RouterError):
    """The client can correct it."""


class BodyRejected(InvalidRequest):
    """The body could not be read as what the route expects."""


class NotJson(BodyRejected):
    template = "Failed to parse the request body as JSON: {}"


class WrongJsonType(BodyRejected):
    template = "Failed to deserialize the JSON body into the target type: {}"


class WrongMediaType(BodyRejected):
    template = "Expected request with `Content-Type: application/json`"


class BodyTooLarge(BodyRejected):
    template = "Failed to buffer the request body: length limit exceeded"


class BodyTooDetailed(BodyRejected):
    """So many values that they would take too much memory."""

    template = "Failed to parse the request body as JSON: its values would take more than {} bytes of memory"

    def __init__(self, limit: int) -> None:
        super().__init__(str(limit))


class BodyTimeout(BodyRejected):
    template = "Failed to buffer the request body: it arrived too slowly"


class BadContentEncoding(BodyRejected):
    template = "Failed to decode the request body as gzip: {}"


class UnsupportedContentEncoding(BodyRejected):
    template = "`Content-Encoding: {}` is not supported: send the body as it is, or with gzip"


class ValidationError(InvalidRequest):
    """A field or a combination of fields breaks a rule."""

    template = "Input validation error: {}"


class UnsupportedField(ValidationError):
    """A field that other servers support and this one does not; never silently ignored."""

    def __init__(self, name: str, reason: str = "is not supported by this server") -> None:
        super().__init__(f"`{name}` {reason}", param=name, code="unsupported_parameter")


class NoHeads(UnsupportedField):
    """`speculative_method` is medusa, and there are no heads."""

    def __init__(self) -> None:
        super().__init__("speculative_method", "medusa needs heads: the request's adapter has none")


class TooManyTokens(ValidationError):
    """A text has more tokens than the model takes."""


class WrongTask(InvalidRequest):
    """The route is for models of another task."""


class TokenInvalid(ValidationError):
    """The token for a source cannot be sent to any."""


class ChatTemplateError(InvalidRequest):
    template = "Failed applying chat template to inputs: {}"


class ToolError(InvalidRequest):
    """The tools of the request cannot be used as it asks."""

    template = "Tool error: {}"


class ModelNotFound(InvalidRequest):
    template = "The model `{}` does not exist"
    param = "model"

    def __init__(self, name: str, reason: str = "") -> None:
        super().__init__(name)
        if reason:
            self.args = (f"{self}: {reason}",)


class LoraNotFound(ModelNotFound):
    """vLLM's text."""

    template = "The lora adapter '{}' cannot be found."
    param = "lora_name"


class StreamNotFound(InvalidRequest):
    template = "There is no resumable stream `{}` of this caller, or it is not kept any more"


class StreamExists(InvalidRequest):
    template = "A resumable stream with the id `{}` is running: choose another `x-request-id`"


class StreamTrimmed(InvalidRequest):
    template = "The stream is too long to keep whole: its first event that is kept is {}"
    param = "from"


class ResponseNotFound(InvalidRequest):
    """OpenAI's text."""

    template = "Response with id '{}' not found."
    param = "id"


class UnknownRoute(InvalidRequest):
    template = "Not Found"


class UnknownMethod(InvalidRequest):
    template = "Method Not Allowed"


class AdapterProblem(InvalidRequest):
    """Begins as LoRAX's errors do, which its client parses; the status tells client errors from the server's."""

    template = "Request failed during generation: Server error: {}"
    param = "model"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = self.retry_after if retry_after is None else retry_after


class AdapterUnknown(AdapterProblem):
    """No source has it."""


class AdapterUnauthorized(AdapterProblem):
    """The caller sent no token."""


class AdapterForbidden(AdapterProblem):
    """The caller's token does not grant access."""


class AdapterRefused(AdapterProblem):
    """Broken, malicious, for another base, or of an unsupported kind."""


class AdapterUnavailable(AdapterProblem):
    """An adapter's source cannot be reached, or its files cannot be read now."""

    retry_after = 5.0


class AdapterSourceInvalid(AdapterUnavailable):
    """An adapter's source answers with something that its protocol does not permit."""


class AdapterLoadFailed(AdapterProblem):
    """The loader failed."""


_BY_STATUS: dict[int, type[AdapterProblem]] = {
    401: AdapterUnauthorized,
    403: AdapterForbidden,
    404: AdapterUnknown,
    422: AdapterRefused,
    502: AdapterSourceInvalid,
    503: AdapterUnavailable,
}


def adapter_problem(error: AdapterError) -> AdapterProblem:
    """An error of a source or of the loader as an answer."""
    return _BY_STATUS.get(error.status, AdapterLoadFailed)(str(error), error.retry_after)


class AdminOnly(InvalidRequest):
    """The route needs the admin key."""


class KeyRequired(InvalidRequest):
    """The server is closed to requests without one of its API keys."""

    def __init__(self) -> None:
        super().__init__(
            "this server needs a valid API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        )


class TwoCredentials(KeyRequired):
    """Two headers hold different credentials, at least one of which is neither a key nor for a source."""

    def __init__(self) -> None:
        InvalidRequest.__init__(
            self,
            "`Authorization` and `x-api-key` hold two different credentials: send one API key. Next to a key in "
            "`x-api-key`, `Authorization` may hold a token for the source of an adapter",
        )


class TooManyFailedKeys(InvalidRequest):
    """An address has sent many invalid keys."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("too many invalid API keys were sent from this address: repeat the request later")
        self.retry_after = retry_after


class HostNotAllowed(InvalidRequest):
    """The name in `Host` is not one of this server, which has no keys: a page could have made it resolve to here."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"the host {host[:256]!r} is not a name of this server: connections over loopback may use localhost, a"
            " loopback address or --hostname. Name it with --allowed-hosts, or the reverse proxy with --trusted-proxies"
        )


class ForeignPage(InvalidRequest):
    """A page of another site asks a server without keys to work."""

    def __init__(self) -> None:
        super().__init__(
            "pages of other sites may not do this on a server without API keys: name the site with --cors-allow-origin"
        )


class AlreadyLoaded(InvalidRequest):
    """vLLM's text for a name that is in use."""

    template = (
        "The lora adapter '{}' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    param = "lora_name"


class ReloadRefused(InvalidRequest):
    """An administrator's request conflicts with the server's state or with its files; nothing has changed."""


class Refused(RouterError):
    """The server cannot accept it now."""


class Overloaded(Refused):
    """More requests than `max_concurrent_requests`."""

    template = "Model is overloaded"

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__()
        self.retry_after = retry_after


class QueueTimeout(Overloaded):
    """The request waited longer for a shard than `max_queue_seconds`."""


class BodyMemoryFull(Refused):
    """The request bodies that are being read take all of `max_body_memory`, or the caller's share."""

    template = "Too many large request bodies at once"
    retry_after = 1.0


class TooManyStreams(Refused):
    """Each of them is running or being read."""

    template = "Too many resumable streams are open: the limit is {}"
    retry_after = 1.0


class KeyLimitReached(Refused):
    """A limit of the caller's API key."""

    template = "this API key allows {}: repeat the request later"

    def __init__(self, limit: str, retry_after: float) -> None:
        super().__init__(limit)
        self.retry_after = retry_after


class ShuttingDown(Refused):
    template = "The server is shutting down"
    retry_after = 1.0


class NoShard(Refused):
    template = "No shard is ready"
    retry_after = 5.0


class ModelLoading(NoShard):
    """The server has started, and no shard has been ready yet."""

    template = "The model is loading: repeat the request when GET /ready answers with status 200"


class Unhealthy(Refused):
    template = "unhealthy"
    retry_after = 5.0


class RouteNotServed(Refused):
    """A route of LoRAX or OpenAI that this server does not support."""

    template = "{}"

    def __init__(self, path: str, alternative: str = "") -> None:
        super().__init__(f"`{path}` is not supported by this server" + (alternative and f": {alternative}"))


class Failed(RouterError):
    """The request started and failed."""


class GenerationFailed(Failed):
    template = "Request failed during generation: {}"


class PoisonRequest(Failed):
    template = "Request failed during generation: every shard that ran it crashed, the last one while running it alone"


class IncompleteGeneration(Failed):
    template = "Incomplete generation"


class DeadlineExceeded(Failed):
    template = "Request exceeded the time limit"


class AnswerTooLarge(Failed):
    """The details of an answer, or of all answers together, take too much memory."""

    def __init__(self, limit: str) -> None:
        super().__init__(
            f"the answer with its details takes too much memory: one may have {limit}. Ask for fewer tokens or"
            " alternatives, or stream it"
        )


class InternalError(Failed):
    template = "Internal server error"

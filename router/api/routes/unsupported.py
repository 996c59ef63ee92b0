"""Routes of other servers that this one does not have: an error names the route and the alternative."""

from starlette.requests import Request
from starlette.responses import Response

from lorikeet.router.errors import NotServed

_TEXT_ALONE = "the model reads and writes text alone"
_NO_STORAGE = "the server stores no requests, answers or files"
ALTERNATIVES = {
    "/v1/audio": _TEXT_ALONE,
    "/v1/images": _TEXT_ALONE,
    "/v1/videos": _TEXT_ALONE,
    "/v1/realtime": _TEXT_ALONE,
    "/v1/files": _NO_STORAGE,
    "/v1/uploads": _NO_STORAGE,
    "/v1/vector_stores": _NO_STORAGE,
    "/v1/conversations": f"{_NO_STORAGE}: send the whole conversation",
    "/v1/assistants": f"{_NO_STORAGE}: use /v1/responses or /v1/chat/completions",
    "/v1/threads": f"{_NO_STORAGE}: use /v1/responses or /v1/chat/completions",
    "/v1/batches": "send the requests at once: they share the server's batch, and `priority` lets others go first",
    "/v1/messages/batches": "send the requests at once: they share the server's batch",
    "/v1/embed": "use /v2/embed with the same texts, or /v1/embeddings",
    "/v1/fine_tuning": "train an adapter with PEFT, and name it as `model`",
    "/v1/evals": "lm-eval measures models over /v1/completions",
    "/v1/moderations": "serve a classifier, or ask the model itself",
}
"""By the beginning of a path. docs/routes.md lists them."""
METHODS = ("GET", "POST", "DELETE")


async def out_of_scope(request: Request) -> Response:
    """501, rather than 404, which would suggest a misspelt path."""
    path = request.url.path
    prefix = max((each for each in ALTERNATIVES if path.startswith(each)), key=len)
    raise NotServed(prefix, ALTERNATIVES[prefix])

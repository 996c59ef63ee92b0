"""What a hub may answer: a schema of its description of a repository, and checks of the headers that name files.

No hub is trusted. Its library names files in its cache by headers, so its HTTP client checks them before it sees them.
Imports no torch, and the library at first use.
"""

import json
import re
import time
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lorikeet.adapters.errors import AdapterInvalid, InvalidAnswer
from lorikeet.adapters.refs import Ref
from lorikeet.proto.numbers import whole_number

MAX_ANSWER_BYTES = 16 << 20
MAX_FILES = 10_000
MAX_FILE_BYTES = 1 << 50
_COMMIT = r"^(?:[0-9a-f]{40}|[0-9a-f]{64})\Z"
_ETAG = re.compile(r'(?:W/)?"?(?P<digest>[0-9A-Fa-f]{32,128})(?:-[0-9]{1,5})?"?')
"""A digest of the content; `-N` follows that of a file that was uploaded in N parts."""
IS_PARSED = "lorikeet_is_parsed"
"""Marks requests whose answers are parsed by a schema of this module."""

Commit = Annotated[str, Field(pattern=_COMMIT)]
Size = Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]


class _HubAnswer(BaseModel):
    """Fields have the types that the hub documents; others are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", regex_engine="python-re")


Schema = TypeVar("Schema", bound=BaseModel)


class LargeFile(_HubAnswer):
    """What is known of a file that is stored by its hash."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\Z")]


class HubFile(_HubAnswer):
    """One file of a repository."""

    rfilename: Annotated[str, Field(min_length=1, max_length=1024)]
    size: Size | None = None
    lfs: LargeFile | None = None


class Repository(_HubAnswer):
    """A repository at one commit."""

    sha: Commit
    id: Annotated[str, Field(max_length=512)] | None = None
    private: bool | None = None
    gated: bool | Annotated[str, Field(max_length=64)] | None = None

    @property
    def needs_token(self) -> bool:
        return bool(self.private) or bool(self.gated)


class Listing(Repository):
    """A repository with its files."""

    siblings: Annotated[list[HubFile], Field(max_length=MAX_FILES)] | None = None

    def top_level(self) -> dict[str, HubFile]:
        """The files outside of folders, by name. Names that no file of this machine may have are left out."""
        names = ((file.rfilename, file) for file in self.siblings or ())
        return {name: file for name, file in names if "/" not in name and name.isprintable() and len(name) <= 255}


def is_commit(text: str) -> bool:
    """Whether `text` can be the id of a commit: it becomes a part of paths."""
    return re.match(_COMMIT, text) is not None


def parse(answer: bytes, schema: type[Schema], name: str) -> Schema:
    """The answer about the repository `name`. Raises AdapterInvalid for too many files, and InvalidAnswer."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise AdapterInvalid(f"the hub describes {name} in more than {MAX_ANSWER_BYTES} bytes")
    try:
        return schema.model_validate_json(answer)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(map(str, problem["loc"]))[:80]
    if problem["type"] == "too_long" and field == "siblings":
        raise AdapterInvalid(f"{name} has more than {MAX_FILES} files at the hub")
    where = f"`{field}`: " if field else ""
    raise InvalidAnswer(f"the hub's description of {name} is invalid: {where}{problem['msg']}")


@cache
def library() -> Any:
    """huggingface_hub, with a client that checks every answer from which the library makes names of files."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    def make_client() -> Any:
        client = _http.default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), check_answer]}
        return client

    huggingface_hub.set_client_factory(make_client)
    return huggingface_hub


def check_answer(response: Any) -> None:
    """Check the headers that describe a file, or the commit of a repository's description. Raises InvalidAnswer."""
    if response.request.method == "HEAD":
        _check_headers(response.headers)
    elif "/api/models/" in response.request.url.path and not response.request.extensions.get(IS_PARSED):
        response.read()
        with suppress(ValueError, RecursionError):  # the library's own error says that it is not JSON
            values = json.loads(response.content)
            commit = values.get("sha") if isinstance(values, dict) else None
            if commit is not None and not (isinstance(commit, str) and is_commit(commit)):
                raise InvalidAnswer("the hub's description of a repository is invalid: `sha` is not a commit")


def _check_headers(headers: Any) -> None:
    for name in ("etag", "x-linked-etag"):
        if name in headers and not _ETAG.fullmatch(headers[name]):
            raise InvalidAnswer(f"the hub's header `{name}` of a file is not a digest")
    if "x-repo-commit" in headers and not is_commit(headers["x-repo-commit"]):
        raise InvalidAnswer("the hub's header `x-repo-commit` of a file is not a commit")
    for name in ("content-length", "x-linked-size"):
        if name in headers and whole_number(headers[name], 0, MAX_FILE_BYTES) is None:
            raise InvalidAnswer(f"the hub's header `{name}` of a file is not a size")


def describe(
    ref: Ref, schema: type[Schema], token: str | bool | None, timeout_s: float, limit_s: float, endpoint: str | None = None
) -> Schema:
    """The hub's description of a repository, with its files where the schema has them.

    `token` is as the library takes it: False is none, None is that of this machine's user. Raises the library's errors,
    TimeoutError, AdapterInvalid and InvalidAnswer.
    """
    hub = library()
    url = f"{endpoint or hub.constants.ENDPOINT}/api/models/{ref.id}"
    if ref.revision is not None:
        url += f"/revision/{quote(ref.revision, safe='')}"
    if schema is Listing:
        url += "?blobs=true"
    headers = hub.utils.build_hf_headers(token=token)
    return parse(read_first(url, headers, MAX_ANSWER_BYTES + 1, timeout_s, limit_s), schema, str(ref))


def read_first(url: str, headers: dict[str, str], num_bytes: int, timeout_s: float, limit_s: float) -> bytes:
    """At most the first `num_bytes` bytes of an answer; no more are transferred.

    The hub may send nothing for `timeout_s`, and all of it within `limit_s`. Raises the library's errors, TimeoutError
    and InvalidAnswer.
    """
    hub, end = library(), time.monotonic() + limit_s
    # a part of a compressed answer cannot be read, and a small one may unpack to gigabytes
    headers = {**headers, "Accept-Encoding": "identity"}
    options = {"headers": headers, "follow_redirects": True, "timeout": timeout_s, "extensions": {IS_PARSED: True}}
    with hub.get_session().stream("GET", url, **options) as response:
        hub.utils.hf_raise_for_status(response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidAnswer("the hub sends compressed content that was not asked for")
        content = bytearray()
        for chunk in response.iter_raw():
            content += chunk
            if len(content) >= num_bytes:
                break
            if time.monotonic() > end:
                raise TimeoutError
        return bytes(content[:num_bytes])

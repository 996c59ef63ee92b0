"""A client of a running server: whole answers, chats, and streams token by token.

Knows the routes and their JSON; nothing but the standard library, so that it starts at once.
"""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit


class ServerError(Exception):
    """The server refused or failed: `status` is HTTP's, the text the server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Token:
    """One token of an answer."""

    id: int
    text: str
    logprob: float | None
    special: bool
    skipped: bool
    """It cost no step of its own."""
    source: str | None
    """Who brought it (`target`, `lookup`, `draft`, …); None where the server does not say."""

    @classmethod
    def read(cls, told: dict[str, Any]) -> Self:
        return cls(
            told["id"], told["text"], told["logprob"], told["special"], told.get("skipped", False), told.get("source")
        )


@dataclass(frozen=True)
class Answer:
    """A whole answer of `/generate`."""

    text: str
    details: dict[str, Any]
    """As LoRAX has them: `tokens`, `finish_reason`, `speculation`, …"""

    @property
    def tokens(self) -> list[Token]:
        return [Token.read(told) for told in self.details["tokens"]]


class Client:
    """Talks to the server at `url`; every call has a connection of its own, so threads may share a client.

    `token` is sent as a bearer's; `timeout_s` is the longest silence that is borne. Calls raise ServerError, and
    OSError where nobody answers.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    def generate(self, prompt: str, **parameters: Any) -> Answer:
        """The answer to `prompt`; `parameters` are those of `/generate`, as in LoRAX."""
        body = {"inputs": prompt, "parameters": {"details": True, **parameters}}
        answer = self.post("/generate", body)
        return Answer(answer["generated_text"], answer.get("details") or {})

    def chat(self, messages: str | Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """OpenAI's chat completion of `messages`, or of one user's message; `fields` stand beside them in the body.

        Without `model` it is whoever answers those that name none: the base, or the server's default adapter.
        """
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        fields = {"model": "", **fields, "messages": said}
        answer: dict[str, Any] = self.post("/v1/chat/completions", fields)
        return answer

    def stream(self, prompt: str, **parameters: Any) -> "Stream":
        """The tokens of the answer to `prompt` as they come."""
        body = {"inputs": prompt, "parameters": {"details": True, **parameters}}
        connection, response = self._send("POST", "/generate_stream", body)
        return Stream(connection, response)

    def info(self) -> dict[str, Any]:
        """What the server serves, as `/info` has it."""
        answer: dict[str, Any] = self._answer("GET", "/info", None)
        return answer

    def post(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that any other route answers."""
        return self._answer("POST", path, body, headers)

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> Any:
        connection, response = self._send(method, path, body, headers)
        try:
            return json.loads(response.read() or b"null")
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        where = urlsplit(self.url)
        kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
        connection = kind(where.netloc, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, where.path + path, data, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(response.status, _message(response.read()))
        except BaseException:
            connection.close()
            raise
        return connection, response


@dataclass
class Stream:
    """Tokens as they come, once. Closing it before its end ends the request in the server too."""

    _connection: http.client.HTTPConnection
    _response: http.client.HTTPResponse
    text: str | None = None
    """The whole text, once the stream has ended."""
    details: dict[str, Any] = field(default_factory=dict)
    """The request's, likewise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Token]:
        try:
            for line in self._response:
                if not line.startswith(b"data:"):
                    continue
                told = json.loads(line.removeprefix(b"data:"))
                if "error" in told:
                    raise ServerError(200, _sentence(told))
                if told["generated_text"] is not None:
                    self.text, self.details = told["generated_text"], told.get("details") or {}
                if told["token"] is not None:
                    yield Token.read(told["token"])
            if self.text is None:
                raise ServerError(200, "the stream broke off")
        finally:
            self.close()

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def _message(body: bytes) -> str:
    try:
        return _sentence(json.loads(body))
    except ValueError:
        return body.decode(errors="replace").strip() or "no reason was given"


def _sentence(told: Any) -> str:
    """The words of an error in LoRAX's or OpenAI's shape."""
    error = told.get("error", told) if isinstance(told, dict) else told
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)

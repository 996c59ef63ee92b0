"""A client of a running server: answers, chats, and streams token by token; and the options of commands that use one.

Imports only the standard library, so that it starts fast.
"""

import argparse
import http.client
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from lorikeet.proto import server_url

TOKEN_VARIABLE = "LORIKEET_TOKEN"
_ENDED_EARLY = "the stream ended early"


def command_parser(prog: str, description: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a command whose help ends with examples."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=description, epilog=examples, formatter_class=formatter)


def add_server_options(parser: Any) -> None:
    """The options of every command that talks to a server. `parser` may be a group of options."""
    default = f"the variable {server_url.VARIABLE}, else http://127.0.0.1:{server_url.PORT}"
    parser.add_argument("--url", help=f"the server (default: {default})")
    parser.add_argument("--token", help=f"bearer token (default: the variable {TOKEN_VARIABLE})")


def token_of(options: argparse.Namespace) -> str | None:
    """The bearer token of a command line."""
    return options.token or os.environ.get(TOKEN_VARIABLE)


def connect(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """A connection to the server at `url`, and the path that precedes its routes."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=timeout_s), parts.path


class ServerError(Exception):
    """An error response: its HTTP status, and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class AnswerToken:
    """One token of an answer."""

    id: int
    text: str
    logprob: float | None
    special: bool
    skipped: bool
    """It was an accepted draft token."""
    source: str | None
    """What proposed it (`target`, `lookup`, `draft`, …); None if the response does not include it."""

    @classmethod
    def read(cls, token: dict[str, Any]) -> Self:
        known = token["id"], token["text"], token["logprob"], token["special"]
        return cls(*known, token.get("skipped", False), token.get("source"))


@dataclass(frozen=True)
class Answer:
    """A whole answer of `/generate`."""

    text: str
    details: dict[str, Any]
    """As in LoRAX: `tokens`, `finish_reason`, `speculation`, …"""

    @property
    def tokens(self) -> list[AnswerToken]:
        return [AnswerToken.read(token) for token in self.details["tokens"]]


class Client:
    """Talks to the server at `url`, which may lack its scheme (`localhost:3000`); without one it is LORIKEET_URL, else
    port 3000 of this machine. Every call opens a connection, so threads may share a client.

    `token` is sent as bearer token; `timeout_s` is the timeout of socket operations. Calls raise ServerError, and
    OSError if the server is not reachable. Raises ValueError if `url` is not a URL.
    """

    def __init__(self, url: str | None = None, token: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = server_url.normalized(url or server_url.default())
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
        """OpenAI's chat completion of `messages`, or of one user message, with other `fields` of the body.

        Without `model`, the server's default adapter or the base model answers.
        """
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        fields = {"model": "", **fields, "messages": listed}
        answer: dict[str, Any] = self.post("/v1/chat/completions", fields)
        return answer

    def chat_events(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed chat completion, with `usage` at the end. `body` as for OpenAI's."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection, response = self._send("POST", "/v1/chat/completions", body)
        try:
            for data in _data_lines(response):
                if data == b"[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if event.get("error"):
                    raise ServerError(200, _sentence(event))
                yield event
            raise ServerError(200, _ENDED_EARLY)
        finally:
            response.close()
            connection.close()

    def model_names(self) -> list[str]:
        """The names that `/v1/models` lists: the model, then its adapters. Raises ServerError if there is none."""
        answer = self._answer("GET", "/v1/models", None)
        names = [str(model["id"]) for model in answer.get("data") or ()] if isinstance(answer, dict) else []
        if not names:
            raise ServerError(200, "the server lists no model")
        return names

    def stream(self, prompt: str, **parameters: Any) -> "Stream":
        """The tokens of the answer to `prompt` as they arrive."""
        body = {"inputs": prompt, "parameters": {"details": True, **parameters}}
        connection, response = self._send("POST", "/generate_stream", body)
        return Stream(connection, response)

    def info(self) -> dict[str, Any]:
        """The response of `/info`."""
        answer: dict[str, Any] = self._answer("GET", "/info", None)
        return answer

    def post(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The JSON response of any other route."""
        return self._answer("POST", path, body, headers)

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> Any:
        connection, response = self._send(method, path, body, headers)
        try:
            return json.loads(response.read() or b"null")
        except http.client.HTTPException as error:
            raise ServerError(response.status, f"the answer to {path} ended early") from error
        except ValueError as error:
            raise ServerError(response.status, f"the answer to {path} is not JSON") from error
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection, prefix = connect(self.url, self._timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, prefix + path, data, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(response.status, _message(response.read()))
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(f"the answer to {path} is not HTTP, or ended early") from error
        except BaseException:
            connection.close()
            raise
        return connection, response


@dataclass
class Stream:
    """Tokens as they arrive; can be iterated once. Closing it early aborts the request in the server too."""

    _connection: http.client.HTTPConnection
    _response: http.client.HTTPResponse
    text: str | None = None
    """The whole text, once the stream has ended."""
    details: dict[str, Any] = field(default_factory=dict)
    """The request's details, likewise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[AnswerToken]:
        try:
            for data in _data_lines(self._response):
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(200, _sentence(event))
                if event["generated_text"] is not None:
                    self.text, self.details = event["generated_text"], event.get("details") or {}
                if event["token"] is not None:
                    yield AnswerToken.read(event["token"])
            if self.text is None:
                raise ServerError(200, _ENDED_EARLY)
        finally:
            self.close()

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def _data_lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events. Raises ServerError if the connection ends within one."""
    try:
        for line in response:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
    except http.client.HTTPException as error:
        raise ServerError(200, _ENDED_EARLY) from error


def _message(body: bytes) -> str:
    try:
        return _sentence(json.loads(body))
    except ValueError:
        return body.decode(errors="replace").strip() or "no reason was given"


def _sentence(body: Any) -> str:
    """The message of an error in LoRAX's or OpenAI's shape."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)

"""A hub whose answers are wrong, in another way for each of its repositories."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

COMMIT = "a" * 40
OUT = "../../../outside"
"""From the folder of a repository's contents in the hub's cache."""
FILES = {"adapter_config.json": b'{"peft_type": "LORA", "r": 8}', "adapter_model.safetensors": b"weights"}


def _changed(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda description: description | fields


def _file(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The first file with other fields."""

    def change(description: dict[str, Any]) -> dict[str, Any]:
        first, *others = description["siblings"]
        return description | {"siblings": [first | fields, *others]}

    return change


DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "commit-is-a-number": _changed(sha=12),
    "commit-is-a-path": _changed(sha="../../../etc"),
    "name-is-a-list": _changed(id=["a"]),
    "files-are-no-list": _changed(siblings={"a": 1}),
    "size-is-a-text": _file(size="many"),
    "size-is-huge": _file(size=10**4000),
    "hash-is-a-number": _file(lfs={"sha256": 8, "size": 8, "pointerSize": 8}),
}
HEADERS = {
    "etag-is-a-path": {"ETag": f'"{OUT}/etag"'},
    "linked-etag-is-a-path": {"X-Linked-ETag": f'"{OUT}/linked"'},
    "file-commit-is-a-path": {"X-Repo-Commit": f"{OUT}/commit"},
    "linked-size-is-a-text": {"X-Linked-Size": "many"},
}
"""Of answers for files."""
RETRY_AFTER = "retry-after-is-huge"
"""429 with a `Retry-After` of 400 digits."""
MANY_FILES = "files"
"""The description of 300 000 files."""
REPOSITORIES = (*DESCRIPTIONS, *HEADERS, RETRY_AFTER)
"""Those whose answers break the protocol, below the name `evil`."""


async def answer_as_hub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request and close the connection."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path = head.split(" ")[:2]
        words = path.partition("?")[0].split("/")
        if "resolve" in words:
            _send(writer, _file_headers(words[2], words[-1]), FILES.get(words[-1], b"") if method == "GET" else b"")
        elif MANY_FILES in words:
            await _send_many_files(writer)
        elif RETRY_AFTER in words:
            _send(writer, {"Retry-After": "9" * 400, "Content-Length": "0"}, b"", "429 Too Many Requests")
        elif repository := next((word for word in words if word in REPOSITORIES), None):
            _send_description(writer, repository)
        else:
            _send(writer, {"Content-Length": "0"}, b"", "404 Not Found")
        await writer.drain()
    writer.close()


def _send(writer: asyncio.StreamWriter, headers: dict[str, str], body: bytes, status: str = "200 OK") -> None:
    lines = [f"HTTP/1.1 {status}", "Connection: close", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


def _file_headers(repository: str, name: str) -> dict[str, str]:
    size = str(len(FILES.get(name, b"")))
    return {"ETag": f'"{"b" * 40}"', "X-Repo-Commit": COMMIT, "Content-Length": size} | HEADERS.get(repository, {})


def _send_description(writer: asyncio.StreamWriter, repository: str) -> None:
    files = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
    sound = {"id": f"evil/{repository}", "sha": COMMIT, "private": False, "siblings": files}
    text = json.dumps(DESCRIPTIONS.get(repository, _changed())(sound)).encode()
    _send(writer, {"Content-Type": "application/json", "Content-Length": str(len(text))}, text)


async def _send_many_files(writer: asyncio.StreamWriter) -> None:
    files = b"".join(b'{"rfilename":"file-%06d","size":1},' % number for number in range(1000))
    _send(writer, {"Content-Type": "application/json"}, b'{"id":"evil/files","sha":"%s","siblings":[' % COMMIT.encode())
    for _ in range(300):
        writer.write(files)
        await writer.drain()

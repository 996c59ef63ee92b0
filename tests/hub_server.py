"""A model hub on the loopback: the part of the Hugging Face hub's HTTP interface that downloads use.

Serves folders as repositories with commits, branches, ETags, ranges, and private ones for holders of a token. Knows
nothing of our code; `HF_ENDPOINT` points clients here.
"""

import enum
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


class Trouble(enum.Enum):
    """Faults of the hub for one repository."""

    MUTE = "never answers a question about it"
    SILENT = "never answers a request for a file"
    STALLED = "sends half of a file, then nothing"
    TRICKLING = "sends a byte now and then"
    SHORT = "ends the connection within a file, and begins at its beginning whatever is asked for"
    OTHER = "sends as many bytes, of something else"
    PAGE = "sends a page in place of weights, and says so in the headers"
    CIRCLE = "sends everybody on to where they are"


@dataclass
class Repository:
    """One repository: its branches, and the files of each commit."""

    files: dict[str, bytes]
    token: str | None = None
    """Without it, the repository is reported as missing."""
    gated: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Further revisions by name."""
    open: threading.Event | None = None
    """Contents of files are sent once this is set."""
    trouble: Trouble | None = None

    def revision(self, name: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch or a commit."""
        everything = {"main": self.files, **self.branches}
        for branch, files in everything.items():
            if name in (branch, commit_of(files)):
                return commit_of(files), files
        return None


def commit_of(files: dict[str, bytes]) -> str:
    """The commit id of these files."""
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()


@dataclass(repr=False)
class HubServer:
    """The running hub: its repositories by id, and every request it received."""

    repositories: dict[str, Repository]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """The Authorization header of each."""
    ranges: list[str] = field(default_factory=list)
    """Range headers of requests for parts of files."""
    rejected: set[str] = field(default_factory=set)
    """Tokens that the hub does not know: 401 for every repository."""
    status: int | None = None
    """The status of every response, if it is set."""
    cut_after: int | None = None
    """Number of bytes after which the connection of a file is closed, if it is set."""
    change_answer: Callable[[Any], Any] | None = None
    """Changes the values of every JSON answer to a question about a repository."""
    more_headers: dict[str, str] = field(default_factory=dict)
    """Replace headers of every response."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when requests need not hang any longer."""


@contextmanager
def hub(repositories: dict[str, Repository]) -> Iterator[HubServer]:
    """Serve `repositories` until the block ends."""
    state = HubServer(repositories)
    handler = type("Bound", (_Answers,), {"state": state})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        state.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


_API = re.compile(r"/api/models/(?P<id>[^/]+(?:/[^/]+)?)(?:/(?P<kind>revision|tree)/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<id>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


class _Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: HubServer

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def log_message(self, *arguments: Any) -> None:
        """Silent."""

    def _answer(self, body: bool) -> None:
        path = urllib.parse.urlsplit(self.path).path
        self.state.requests.append(f"{self.command} {path}")
        self.state.tokens.append(self.headers.get("Authorization", ""))
        if self.state.status is not None:
            return self._refuse(self.state.status, "Broken", "out of order", body)
        found = _API.fullmatch(path) or _FILE.fullmatch(path)
        if found is None:
            return self._send(404, {"X-Error-Message": "no such page"}, b"{}", body)
        repository = self.state.repositories.get(found["id"])
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if shown in self.state.rejected:
            return self._refuse(401, "", "Invalid credentials in Authorization header", body)
        if repository is None or (repository.token is not None and shown != repository.token and not repository.gated):
            return self._refuse(401 if not shown else 404, "RepoNotFound", "Repository not found", body)
        if repository.gated and shown != repository.token:
            return self._refuse(403 if shown else 401, "GatedRepo", f"Access to {found['id']} is restricted", body)
        version = repository.revision(urllib.parse.unquote(found["revision"] or "main"))
        if version is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id", body)
        commit, files = version
        if self._is_troubled(repository.trouble, found.groupdict().get("name"), commit, files, body):
            return None
        if "name" in found.groupdict():
            if body and repository.open is not None:
                repository.open.wait(60)
            return self._file(commit, files, urllib.parse.unquote(found["name"]), body)
        answer: Any = _tree(files) if found["kind"] == "tree" else _info(found["id"], commit, files, repository)
        if self.state.change_answer is not None:
            answer = self.state.change_answer(answer)
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode(), body)

    def _is_troubled(
        self, trouble: Trouble | None, name: str | None, commit: str, files: dict[str, bytes], body: bool
    ) -> bool:
        """Whether a fault replaced the response. Faults of contents affect only weights."""
        match trouble:
            case None:
                return False
            case Trouble.MUTE if name is None:
                return self._wait()
            case Trouble.SILENT if name is not None:
                return self._wait()
            case Trouble.CIRCLE if name is not None:
                self._send(302, {"Location": self.path}, b"", body)
                return True
        if name is None or not name.endswith(".safetensors"):
            return False
        headers = {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": commit}
        if trouble is Trouble.PAGE:
            page = b"<!doctype html><title>Please log in</title>"
            self._send(200, {**headers, "Content-Type": "text/html"}, page, body)
            return True
        if not body:
            return False
        content = files[name]
        if trouble is Trouble.OTHER:  # tensors of the right shapes with other values
            self._send(200, headers, content[:-4096] + bytes(4096), body)
            return True
        self.close_connection = True
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        if trouble is Trouble.STALLED:
            return self._wait()
        if trouble is Trouble.TRICKLING:
            while not self.state.ended.wait(0.2):
                self.wfile.write(b"\0")
        return True

    def _wait(self) -> bool:
        self.close_connection = True
        return self.state.ended.wait()

    def _file(self, commit: str, files: dict[str, bytes], name: str, body: bool) -> None:
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found", body, {"X-Repo-Commit": commit})
        content = files[name]
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, headers, content, body)
        self.state.ranges.append(wanted[0])
        start, end = int(wanted[1]), int(wanted[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return self._send(206, headers, content[start : end + 1], body)

    def _refuse(self, status: int, code: str, message: str, body: bool, more: dict[str, str] | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
        self._send(status, headers | (more or {}), json.dumps({"error": message}).encode(), body)

    def _send(self, status: int, headers: dict[str, str], content: bytes, body: bool) -> None:
        self.send_response(status)
        for name, value in ({**headers, "Content-Length": str(len(content))} | self.state.more_headers).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            cut = self.state.cut_after
            if cut is not None and len(content) > cut:
                content, self.close_connection = content[:cut], True
            self.wfile.write(content)


def _info(id: str, commit: str, files: dict[str, bytes], repository: Repository) -> dict[str, Any]:
    return {
        "_id": commit[:24],
        "id": id,
        "modelId": id,
        "sha": commit,
        "private": repository.token is not None and not repository.gated,
        "disabled": False,
        "gated": "auto" if repository.gated else False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [_sibling(name, files[name]) for name in sorted(files)],
    }


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    about: dict[str, Any] = {"rfilename": name, "size": len(content)}
    if name.endswith((".safetensors", ".bin")):  # large files are named by their hash
        about["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return about


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in sorted(files.items())
    ]

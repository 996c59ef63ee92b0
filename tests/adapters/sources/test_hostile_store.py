"""An object store that sends anything at all: errors of adapters, and no file outside of the folder for it."""

import asyncio
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lorikeet.adapters.errors import AdapterError, InvalidAnswer
from lorikeet.adapters.refs import Pin, Ref, SourceKind
from lorikeet.adapters.sources.listed import S3Source

STATUSES = {404, 422, 502, 503}
WEIGHTS = b"x" * 700


@dataclass
class Store:
    """The answers of the running store."""

    url: str = ""
    listing: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    state = Store()

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            """Silent."""

        def do_GET(self) -> None:
            content = state.listing if "list-type" in self.path else WEIGHTS if "model" in self.path else b'{"r": 8}'
            status, asked = state.status, self.headers.get("Range")
            ranged = {}
            if asked is not None and status == 200:
                start, end = (int(number or len(content) - 1) for number in asked.removeprefix("bytes=").split("-"))
                status, ranged = 206, {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
                content = content[start : end + 1]
            self.send_response(status)
            dated = ranged | {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "ETag": '"a"'}
            for name, value in {"Content-Length": str(len(content)), **dated, **state.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")


TIME = "2015-10-21T07:28:00Z"
SOUND = [("p/adapter_config.json", "8", TIME, '"a"'), ("p/adapter_model.safetensors", "700", TIME, '"b"')]


def listing(objects: list[tuple[str, str, str, str]]) -> bytes:
    contents = "".join(
        f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{time}</LastModified><ETag>{tag}</ETag></Contents>"
        for key, size, time, tag in objects
    )
    text = f"<ListBucketResult><Name>b</Name><Prefix>p/</Prefix><IsTruncated>false</IsTruncated>{contents}"
    return f'<?xml version="1.0" encoding="UTF-8"?>{text}</ListBucketResult>'.encode(errors="replace")


def outcomes(store: Store, folder: Path) -> list[str]:
    """What resolving, reading small files and fetching give: `read`, or the kind of the error."""
    (folder / "in").mkdir()
    source, outcome_names = S3Source(10_000, {"S3_ENDPOINT_URL": store.url}), []
    ref = Ref(SourceKind.S3, "b/p")
    calls: list[Callable[[], object]] = [
        lambda: asyncio.run(source.resolve(ref, None)),
        lambda: asyncio.run(source.small_files(Pin(SourceKind.S3, "b/p", "x"), None)),
        lambda: source.fetch(asyncio.run(source.resolve(ref, None)).pin, None, folder / "in"),
    ]
    for call in calls:
        try:
            call()
            outcome_names.append("read")
        except AdapterError as error:
            assert error.status in STATUSES and len(str(error)) < 1000
            outcome_names.append(type(error).__name__)
    assert [path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(folder / "in")] == []
    return outcome_names


def test_a_sound_store_is_read(store: Store, tmp_path: Path) -> None:
    store.listing, store.headers, store.status = listing(SOUND), {}, 200
    assert outcomes(store, tmp_path) == ["read"] * 3
    assert (tmp_path / "in/adapter_model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("size", [str(1 << 62), str((1 << 64) - 1)])
def test_sizes_have_a_range(store: Store, tmp_path: Path, size: str) -> None:
    store.listing, store.headers, store.status = listing([SOUND[0], (SOUND[1][0], size, TIME, '"b"')]), {}, 200
    with pytest.raises(InvalidAnswer, match="`size`"):
        asyncio.run(S3Source(10_000, {"S3_ENDPOINT_URL": store.url}).resolve(Ref(SourceKind.S3, "b/p"), None))


VALUES = st.sampled_from(
    ["8", "-1", "9" * 400, "x", "", "1e9", "../../x", "p/../x", "/etc/passwd", "\u202e", "%2e%2e%2f", "a" * 2000, TIME,
     "9999999-01-01T00:00:00Z", "&lt;", str((1 << 64) - 1), "0"]
)  # fmt: skip
OBJECTS = st.one_of(
    *(st.just(entry) for entry in SOUND),
    st.tuples(VALUES | st.just("p/adapter_config.json"), st.just("8"), st.just(TIME), st.just('"a"')),
    st.tuples(st.sampled_from([entry[0] for entry in SOUND]), VALUES | st.just("8"), VALUES | st.just(TIME), VALUES),
)
CASES = st.tuples(
    st.lists(OBJECTS, max_size=4),
    st.dictionaries(st.sampled_from(["ETag", "Last-Modified", "Content-Range", "Content-Length"]), VALUES, max_size=1),
    st.sampled_from([200, 200, 200, 206, 304, 400, 403, 404, 412, 416]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES)
@example(case=([("p/adapter_config.json", "0", TIME, "8")], {}, 200))
def test_hostile_listings(case: Any, store: Store, tmp_path_factory: pytest.TempPathFactory) -> None:
    objects, headers, store.status = case
    store.listing = listing([*SOUND[:2], *objects])
    store.headers = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    outcomes(store, tmp_path_factory.mktemp("store"))

"""A hub that sends anything at all: errors with a reason and a status, and no file outside of the folders for it."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorikeet.adapters.errors import AdapterError, AdapterInvalid, AdapterTooLarge, InvalidAnswer, SourceUnreachable
from lorikeet.adapters.refs import parse
from lorikeet.adapters.sources import hub as hub_source
from lorikeet.adapters.sources.hub import HubSource
from tests.hub_server import HubServer, Repository, hub

pytestmark = pytest.mark.anyio

FILES = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": b"weights" * 100}
STATUSES = {401, 403, 404, 422, 502, 503}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    repositories = {"a/public": Repository(dict(FILES)), "a/private": Repository(dict(FILES), token="hf_right")}
    with hub(repositories) as running:
        yield running


@pytest.fixture(autouse=True)
def honest(server: HubServer) -> None:
    server.change_answer, server.status = None, None
    server.more_headers.clear()


def source(server: HubServer, folder: Path) -> HubSource:
    return HubSource(str(folder / "in/cache"), 10_000, str(folder / "in/notes"), server.url)


def outside(folder: Path) -> list[Path]:
    """Files that are not in the folders which a source was given."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(folder / "in")]


OUT = "../../../../out"
"""From the folder of the cache where the library puts contents, locks and commits."""
HEADERS: dict[str, dict[str, str]] = {
    "an ETag with a path": {"ETag": f'"{OUT}/etag"'},
    "an ETag that is a path": {"ETag": '"/OUTSIDE/etag"'},
    "a linked ETag with a path": {"X-Linked-ETag": f'"{OUT}/etag"'},
    "an ETag of nothing": {"ETag": '""'},
    "a commit with a path": {"X-Repo-Commit": f"{OUT}/commit"},
    "a commit of points": {"X-Repo-Commit": ".."},
    "a size of text": {"X-Linked-Size": "many"},
    "a size of 5 000 digits": {"X-Linked-Size": "9" * 5000},
    "a negative size": {"X-Linked-Size": "-1"},
}


@pytest.mark.parametrize("id", ["a/public", "a/private"])
@pytest.mark.parametrize("case", HEADERS)
async def test_headers_name_no_file(case: str, id: str, server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    pin = (await here.resolve(parse(id), "hf_right")).pin
    own = tmp_path / "in/own"
    own.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    for folder in ("models--a--public/blobs", ".locks/models--a--public"):
        (tmp_path / "in/cache" / folder).mkdir(parents=True)
    server.more_headers.update({key: value.replace("/OUTSIDE", str(tmp_path)) for key, value in HEADERS[case].items()})
    with pytest.raises(InvalidAnswer, match="the hub's header") as caught:
        here.fetch(pin, "hf_right", own)
    assert caught.value.status == 502
    assert outside(tmp_path) == []
    server.more_headers.clear()
    assert (here.fetch(pin, "hf_right", own) / "adapter_model.safetensors").read_bytes() == b"weights" * 100


def changed(**fields: Any) -> Callable[[Any], Any]:
    return lambda answer: {**answer, **fields}


def file(**fields: Any) -> Callable[[Any], Any]:
    """The first file of the listing with other fields."""
    return lambda answer: {**answer, "siblings": [{**answer["siblings"][0], **fields}, *answer["siblings"][1:]]}


ANSWERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a commit that is a number": (changed(sha=12), "`sha`"),
    "a commit that is a path": (changed(sha="../../../etc"), "`sha`"),
    "a commit with a line": (changed(sha="a" * 40 + "\n"), "`sha`"),
    "no commit": (lambda answer: {key: value for key, value in answer.items() if key != "sha"}, "`sha`"),
    "a name that is a list": (changed(id=["a"]), "`id`"),
    "privacy that is a text": (changed(private="no"), "`private`"),
    "no object": (lambda answer: [answer], "description of a/public"),
}
LISTINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "files that are no list": (changed(siblings={"a": 1}), "`siblings`"),
    "a file that is a text": (changed(siblings=["adapter_config.json"]), "`siblings.0`"),
    "a size that is a text": (file(size="8"), "`siblings.0.size`"),
    "a size below 0": (file(size=-1), "`siblings.0.size`"),
    "a size above all disks": (file(size=1 << 63), "`siblings.0.size`"),
    "a size of 5 000 digits": (file(size=int("9" * 4000)), "siblings|JSON"),
    "a size that is a fraction": (file(size=8.5), "`siblings.0.size`"),
    "a name that is a number": (file(rfilename=8), "`siblings.0.rfilename`"),
    "a hash that is a number": (file(lfs={"sha256": 8, "size": 8, "pointerSize": 8}), "`siblings.0.lfs.sha256`"),
    "a hash that is a path": (file(lfs={"sha256": "../x", "size": 8, "pointerSize": 8}), "`siblings.0.lfs.sha256`"),
}


@pytest.mark.parametrize("case", [*ANSWERS, *LISTINGS])
async def test_answers_are_checked_by_type_and_range(case: str, server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    change, problem = (ANSWERS | LISTINGS)[case]
    pin = (await here.resolve(parse("a/public"), None)).pin
    server.change_answer = change
    with pytest.raises(InvalidAnswer, match=problem) as caught:
        if case in ANSWERS:
            await source(server, tmp_path / "other").resolve(parse("a/public"), None)
        else:
            await here.small_files(pin, None)
    assert caught.value.status == 502 and len(str(caught.value)) < 300


async def test_a_listing_without_end_is_refused(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/public"), None)).pin
    more = [{"rfilename": f"file-{number}"} for number in range(hub_source.MAX_FILES)]
    server.change_answer = lambda answer: {**answer, "siblings": answer["siblings"] + more}
    with pytest.raises(AdapterInvalid, match="more than 10000 files"):
        await here.small_files(pin, None)
    server.change_answer = changed(note="x" * hub_source.MAX_ANSWER_BYTES)
    with pytest.raises(AdapterInvalid, match="in more than 4194304 bytes"):
        await here.small_files(pin, None)
    with pytest.raises(AdapterInvalid, match="in more than 1048576 bytes"):
        await source(server, tmp_path / "other").resolve(parse("a/public"), None)


def test_large_answers_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are always read, and one that is alone."""
    monkeypatch.setattr(hub_source, "USUAL_ANSWER_BYTES", 10)
    monkeypatch.setattr(hub_source, "MAX_LARGE_BYTES", 100)
    memory = hub_source.AnswerMemory()
    with memory.counted() as one, memory.counted() as other, memory.counted() as small:
        for size in (5, 50, 90):
            one(size)
        other(30)
        small(10)
        assert memory.num_bytes == 100
        with pytest.raises(SourceUnreachable, match="too many large answers") as caught:
            other(31)
        assert caught.value.status == 503 and caught.value.retry_after
    assert memory.num_bytes == 0
    with memory.counted() as alone:
        alone(1000)
    assert memory.num_bytes == 0


async def test_an_answer_that_finds_no_memory_is_refused_and_leaves_none(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_source, "MAX_LARGE_BYTES", 1 << 20)
    server.change_answer = changed(note="x" * (hub_source.MAX_NAMES_BYTES // 2))
    with hub_source._memory.counted() as other:
        other(1 << 20)
        with pytest.raises(SourceUnreachable, match="too many large answers"):
            await source(server, tmp_path).resolve(parse("a/public"), None)
    assert (await source(server, tmp_path).resolve(parse("a/public"), None)).is_public
    assert hub_source._memory.num_bytes == 0


async def test_content_that_was_not_asked_to_be_compressed_is_not_unpacked(server: HubServer, tmp_path: Path) -> None:
    server.more_headers["Content-Encoding"] = "gzip"
    with pytest.raises(InvalidAnswer, match="compressed"):
        await source(server, tmp_path).resolve(parse("a/public"), None)


@pytest.mark.parametrize(("sent", "seconds"), [("9" * 400, 5.0), ("²", 5.0), ("-1", 5.0), ("soon", 5.0), ("7", 7.0)])
async def test_how_long_to_wait_is_a_number_in_range(
    server: HubServer, tmp_path: Path, sent: str, seconds: float
) -> None:
    server.status = 429
    server.more_headers["Retry-After"] = sent
    with pytest.raises(SourceUnreachable) as caught:
        await source(server, tmp_path).resolve(parse("a/public"), None)
    assert caught.value.retry_after == seconds


async def test_a_known_name_is_served_while_the_hub_sends_nonsense(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/public"), None)).pin
    server.change_answer = changed(sha=12)
    assert (await here.resolve(parse("a/public"), None)).pin == pin


async def test_noted_commits_are_checked_too(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    await here.resolve(parse("a/public"), None)
    (note,) = (tmp_path / "in/notes").iterdir()
    note.write_text(json.dumps({"commit": "../../../etc"}))
    server.status = 503
    with pytest.raises(SourceUnreachable):
        await here.resolve(parse("a/public"), None)


async def test_the_library_of_models_and_heads_is_guarded(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = hub_source.library()
    assert library is huggingface_hub
    for change, headers in ((changed(sha=f"{OUT}/x"), {}), (None, {"ETag": f'"{OUT}/etag"'})):
        server.change_answer, server.more_headers = change, headers
        with pytest.raises(InvalidAnswer):
            library.snapshot_download("a/public", endpoint=server.url, cache_dir=tmp_path / "in/cache", token=False)
        assert outside(tmp_path) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
    | st.sampled_from(["../../x", "/etc/passwd", "a" * 40, "0" * 64, 1 << 80, -1, 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELDS = ("id", "sha", "private", "gated", "disabled", "siblings")
FILE_FIELDS = ("rfilename", "size", "lfs", "blobId")
NAMES = ("ETag", "X-Linked-ETag", "X-Linked-Size", "X-Repo-Commit", "Content-Length", "Location", "Retry-After",
         "X-Error-Code", "X-Error-Message", "Content-Range", "X-Xet-Hash", "X-Xet-Cas-Url", "Link")  # fmt: skip
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=255), min_size=1, max_size=40) | st.sampled_from(
    ["../../../../out/x", '"../../../../out/x"', "/out/x", "..", "9" * 400, "-1", "0", "1e9", "²", "a" * 40]
)


@st.composite
def hostile(draw: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, str], int | None]:
    """Fields of the answer, fields of a file in it, headers and a status."""
    fields = draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2))
    of_file = draw(st.dictionaries(st.sampled_from(FILE_FIELDS), JSON, max_size=2))
    headers = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2))
    status = draw(st.none() | st.none() | st.sampled_from([204, 301, 304, 400, 401, 403, 404, 416, 418, 429, 500, 503]))
    return fields, of_file, headers, status


def tried(case: Any, server: HubServer, folder: Path) -> None:
    """Resolve, read and fetch; every error is one of an adapter, with a status and a wait."""
    import asyncio

    fields, of_file, headers, status = case
    server.more_headers.clear()
    server.status, server.change_answer = None, None
    huggingface_hub.close_session()  # a wrong Content-Length of the case before has spoilt its connections
    here = source(server, folder)
    pin = asyncio.run(here.resolve(parse("a/public"), None)).pin
    server.status = status
    server.change_answer = lambda answer: file(**of_file)({**answer}) | fields if isinstance(answer, dict) else fields
    server.more_headers.update({name: value.encode("latin-1").decode("latin-1") for name, value in headers.items()})
    (folder / "in/own").mkdir(parents=True, exist_ok=True)
    calls: list[Callable[[], object]] = [
        lambda: asyncio.run(source(server, folder / "in/other").resolve(parse("a/public"), None)),
        lambda: asyncio.run(here.small_files(pin, None)),
        lambda: here.fetch(pin, None, folder / "in/own"),
        lambda: here.heads(pin, None, 100),
    ]
    for call in calls:
        try:
            call()
        except AdapterError as error:
            assert error.status in STATUSES, error
            assert error.status < 500 or (error.retry_after is not None and 1 <= error.retry_after <= 3600)
            assert len(str(error)) < 1000
    assert outside(folder) == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=hostile())
def test_hostile_answers(
    case: Any, server: HubServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    tried(case, server, tmp_path_factory.mktemp("hub"))


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=hostile())
def test_two_thousand_hostile_answers(
    case: Any, server: HubServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)
    tried(case, server, tmp_path_factory.mktemp("hub"))


def test_too_large_files_are_refused_by_their_size(server: HubServer, tmp_path: Path) -> None:
    import asyncio

    here = source(server, tmp_path)
    pin = asyncio.run(here.resolve(parse("a/public"), None)).pin
    server.change_answer = file(size=(1 << 50) - 1)
    with pytest.raises(AdapterTooLarge):
        here.fetch(pin, None, tmp_path / "in/own")
    assert os.listdir(tmp_path) == ["in"]

"""Adapters from a hub on the loopback: rights, revisions, sizes, the cache, resumed downloads and privacy."""

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from lorikeet.adapters.errors import (
    AdapterInvalid,
    AdapterNotAllowed,
    AdapterNotFound,
    AdapterTooLarge,
    LoaderFailed,
    SourceUnreachable,
)
from lorikeet.adapters.refs import Pin, Ref, SourceKind, parse
from lorikeet.adapters.sources.hub import HubSource, _check
from tests.hub_server import HubServer, Repository, Trouble, commit_of, hub

pytestmark = pytest.mark.anyio

FILES = {
    "adapter_config.json": json.dumps({"r": 8}).encode(),
    "adapter_model.safetensors": b"weights" * 100,
    "adapter_model.bin": b"never",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"words",
    "checkpoint-1/adapter_model.safetensors": b"never",
    "training_args.bin": b"never",
}
OLD = {**FILES, "adapter_model.safetensors": b"old"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server() -> Iterator[HubServer]:
    repositories = {
        "a/public": Repository(dict(FILES), branches={"v1": OLD}),
        "a/private": Repository(dict(FILES), token="hf_right"),
        "a/gated": Repository(dict(FILES), token="hf_right", gated=True),
        "a/data": Repository({"data.csv": b""}),
    }
    with hub(repositories) as running:
        yield running


def source(server: HubServer, tmp_path: Path, limit: int = 10_000) -> HubSource:
    return HubSource(str(tmp_path / "cache"), limit, str(tmp_path / "notes"), server.url)


async def test_a_public_adapter(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    resolution = await here.resolve(parse("a/public"), None)
    assert resolution.is_public and resolution.pin.revision == commit_of(FILES)
    folder = here.fetch(resolution.pin, None, tmp_path / "own")
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    }
    assert folder.is_relative_to(tmp_path / "cache")
    asked = len(server.requests)
    assert here.fetch(resolution.pin, None, tmp_path / "own") == folder
    assert len(server.requests) == asked, "what the cache holds whole needs no hub"
    assert (await here.small_files(resolution.pin, None))["chat_template.jinja"] == b"{{ messages }}"


async def test_a_revision_is_a_version(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    resolution = await here.resolve(parse("a/public@v1"), None)
    assert resolution.pin.revision == commit_of(OLD)
    folder = here.fetch(resolution.pin, None, tmp_path)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"old"
    with pytest.raises(AdapterNotFound, match="has no revision v2"):
        await here.resolve(parse("a/public@v2"), None)


async def test_a_private_adapter_is_for_holders_of_its_token(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    resolution = await here.resolve(parse("a/private"), "hf_right")
    assert not resolution.is_public
    (tmp_path / "own").mkdir()
    folder = here.fetch(resolution.pin, "hf_right", tmp_path / "own")
    assert folder == tmp_path / "own"
    assert (folder / "adapter_model.safetensors").read_bytes() == FILES["adapter_model.safetensors"]
    assert await here.small_files(resolution.pin, "hf_right", frozenset({"chat_template.jinja"})) == {
        "chat_template.jinja": b"{{ messages }}"
    }
    for token in ("hf_wrong", None):
        with pytest.raises(AdapterNotFound, match="has no access to it"):
            await here.resolve(parse("a/private"), token)
        with pytest.raises(AdapterNotFound):
            here.fetch(resolution.pin, token, tmp_path / "other")
        with pytest.raises(AdapterNotFound):
            await here.small_files(resolution.pin, token)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] if (tmp_path / "cache").exists() else []
    assert not any(b"weights" in path.read_bytes() for path in kept), "the shared cache never holds what is private"


async def test_a_gated_adapter_is_reported_as_gated(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    for token, status in ((None, 401), ("hf_wrong", 403)):
        with pytest.raises(AdapterNotAllowed, match="is gated") as caught:
            await here.resolve(parse("a/gated"), token)
        assert caught.value.status == status
    resolution = await here.resolve(parse("a/gated"), "hf_right")
    assert not resolution.is_public


async def test_a_public_adapter_does_not_need_a_token_that_the_hub_accepts(server: HubServer, tmp_path: Path) -> None:
    server.rejected.add("EMPTY")
    here = source(server, tmp_path)
    resolution = await here.resolve(parse("a/public"), "EMPTY")
    assert resolution.is_public and resolution.pin.revision == commit_of(FILES)
    for name in ("a/private", "a/gated", "a/none"):
        with pytest.raises(AdapterNotAllowed, match="does not accept the token") as caught:
            await here.resolve(parse(name), "EMPTY")
        assert caught.value.status == 401


async def test_the_machines_own_token_is_never_sent(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    here = source(server, tmp_path)
    with pytest.raises(AdapterNotFound):
        await here.resolve(parse("a/private"), None)
    here.fetch((await here.resolve(parse("a/public"), None)).pin, None, tmp_path)
    assert set(server.tokens) == {""}


async def test_repositories_without_an_adapter(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/data"), None)).pin
    with pytest.raises(AdapterInvalid, match=r"holds no adapter_config\.json"):
        here.fetch(pin, None, tmp_path)
    with pytest.raises(AdapterNotFound, match="was not found at the hub"):
        await here.resolve(parse("a/none"), None)


async def test_sizes_are_checked_first(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path, limit=699)
    pin = (await here.resolve(parse("a/public"), None)).pin
    with pytest.raises(AdapterTooLarge, match="have 700 bytes; this server accepts 699"):
        here.fetch(pin, None, tmp_path)
    assert not any("resolve" in request for request in server.requests)


@pytest.mark.parametrize("status", [500, 502, 503, 429])
async def test_a_failing_hub(server: HubServer, tmp_path: Path, status: int) -> None:
    here = source(server, tmp_path)
    server.status = status
    with pytest.raises(SourceUnreachable) as caught:
        await here.resolve(parse("a/private"), "hf_right")
    assert caught.value.status == 503 and caught.value.retry_after
    assert "hf_right" not in str(caught.value)


async def test_public_names_resolve_without_the_hub_even_after_a_restart(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/public"), None)).pin
    here.fetch(pin, None, tmp_path)
    await here.resolve(parse("a/private"), "hf_right")
    server.status = 503
    later = source(server, tmp_path)
    assert (await later.resolve(parse("a/public"), "whatever")).pin == pin
    assert later.fetch(pin, None, tmp_path).name == pin.revision
    with pytest.raises(SourceUnreachable):
        await later.resolve(parse("a/private"), "hf_right")
    with pytest.raises(SourceUnreachable):
        await later.resolve(parse("a/public@v1"), None)


async def test_a_name_that_became_private_is_forgotten(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path)
    await here.resolve(parse("a/public"), None)
    server.repositories["a/public"].token = "hf_right"
    await here.resolve(parse("a/public"), "hf_right")
    server.status = 503
    with pytest.raises(SourceUnreachable):
        await here.resolve(parse("a/public"), None)


async def test_offline_uses_the_cache_only(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/public"), None)).pin
    here.fetch(pin, None, tmp_path)
    # As the library writes it for whoever downloads by branch.
    refs = tmp_path / "cache" / "models--a--public" / "refs"
    refs.mkdir()
    (refs / "main").write_text(pin.revision)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    assert (await here.resolve(parse("a/public"), None)).pin == pin
    assert (await here.resolve(Ref(SourceKind.HUB, "a/public", pin.revision), None)).pin == pin
    assert here.fetch(pin, None, tmp_path).name == pin.revision
    with pytest.raises(AdapterNotFound, match="HF_HUB_OFFLINE"):
        await here.resolve(parse("a/private"), "hf_right")
    assert server.requests == []


@pytest.mark.parametrize("id", [pytest.param("a/public", marks=pytest.mark.long), "a/private"])
async def test_a_download_resumes(server: HubServer, tmp_path: Path, id: str) -> None:
    weights = bytes(range(256)) * (24 << 12)  # the library keeps what came in pieces of 10 MiB
    server.repositories[id].files["adapter_model.safetensors"] = weights
    here = source(server, tmp_path, limit=100_000_000)
    pin = (await here.resolve(parse(id), "hf_right")).pin
    (tmp_path / "own").mkdir()
    server.cut_after = len(weights) // 2
    try:
        folder = here.fetch(pin, "hf_right", tmp_path / "own")
    except SourceUnreachable:
        server.cut_after = None
        folder = here.fetch(pin, "hf_right", tmp_path / "own")
    assert (folder / "adapter_model.safetensors").read_bytes() == weights
    assert any(not asked.startswith("bytes=0-") for asked in server.ranges)


LORA = {name: FILES[name] for name in ("adapter_config.json", "adapter_model.safetensors")}
HEADS = {"config.json": b'{"medusa_num_heads": 3}', "medusa_lm_head.safetensors": b"heads" * 10}
UNNAMED = b"12345678" + b'{"0.0.linear.weight":{"dtype"' + b" " * 5000


@pytest.mark.parametrize("files", [{**LORA, **HEADS}, HEADS], ids=["with a LoRA", "alone"])
async def test_heads_are_downloaded_too(server: HubServer, tmp_path: Path, files: dict[str, bytes]) -> None:
    server.repositories["a/heads"] = Repository({**files, "pytorch_model.bin": b"never"})
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/heads"), None)).pin
    assert here.heads(pin, None, 4)["medusa_lm_head.safetensors"].content == b"head"
    folder = here.fetch(pin, None, tmp_path)
    assert {file.name for file in folder.iterdir()} == set(files)
    asked = len(server.requests)
    assert here.fetch(pin, None, tmp_path) == folder and len(server.requests) == asked
    (folder / "medusa_lm_head.safetensors").unlink()
    assert (here.fetch(pin, None, tmp_path) / "medusa_lm_head.safetensors").exists(), (
        "without its heads it is not whole"
    )


async def test_heads_under_another_name_are_found_by_their_first_bytes(server: HubServer, tmp_path: Path) -> None:
    model = {"config.json": b"{}", "model.safetensors": b"12345678" + b'{"model.norm.weight":{' + b" " * 200_000}
    server.repositories["a/model"] = Repository(model)
    server.repositories["a/unnamed"] = Repository({**model, "unnamed.safetensors": UNNAMED})
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/model"), None)).pin
    with pytest.raises(AdapterInvalid, match=r"no adapter_config\.json and no medusa_lm_head\.safetensors"):
        here.fetch(pin, None, tmp_path)
    assert all(asked.startswith("bytes=0-") and asked != "bytes=0-" for asked in server.ranges) and server.ranges
    pin = (await here.resolve(parse("a/unnamed"), None)).pin
    folder = here.fetch(pin, None, tmp_path)
    assert {file.name for file in folder.iterdir()} == {"config.json", "unnamed.safetensors"}


def large_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1000]


@pytest.mark.parametrize("id", ["a/public", "a/private"])
@pytest.mark.parametrize("trouble", [Trouble.OTHER, Trouble.PAGE, Trouble.CIRCLE])
async def test_files_that_differ_from_the_listing_are_deleted(
    server: HubServer, tmp_path: Path, id: str, trouble: Trouble
) -> None:
    weights = bytes(range(256)) * 40
    repository = server.repositories[id]
    repository.files["adapter_model.safetensors"] = weights
    here = source(server, tmp_path, limit=100_000)
    pin = (await here.resolve(parse(id), "hf_right")).pin
    (tmp_path / "own").mkdir()
    repository.trouble = trouble
    with pytest.raises(SourceUnreachable, match=r"does not match|TooManyRedirects"):
        here.fetch(pin, "hf_right", tmp_path / "own")
    assert not large_files(tmp_path)
    repository.trouble = None
    folder = here.fetch(pin, "hf_right", tmp_path / "own")
    assert (folder / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(("says", "is_kept"), [(9, True), (None, True), (8, False), (10, False)])
async def test_the_size_of_a_small_file_is_checked(tmp_path: Path, says: int | None, is_kept: bool) -> None:
    """The hub names no hash of it."""
    path = tmp_path / "adapter_config.json"
    path.write_bytes(b'{"r": 8} ')
    file = SimpleNamespace(rfilename=path.name, size=says, lfs=None)
    if is_kept:
        _check(path, file, Pin(SourceKind.HUB, "a/public", "main"))
    else:
        with pytest.raises(SourceUnreachable, match=r"what the hub sent for adapter_config\.json of a/public"):
            _check(path, file, Pin(SourceKind.HUB, "a/public", "main"))
    assert path.exists() == is_kept


async def test_each_part_of_a_fetch_has_a_time_limit(server: HubServer, tmp_path: Path) -> None:
    here = source(server, tmp_path, limit=100_000_000)
    pin = (await here.resolve(parse("a/public"), None)).pin
    allowed: list[float] = []
    here.fetch(pin, None, tmp_path, allowed.append)
    assert allowed == [30 + num_bytes / (1 << 17) for num_bytes in (0, 8, 14, 700)]


@pytest.mark.parametrize("timeouts", [0.1, 3])
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_hub_that_hangs_times_out(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool, timeouts: float
) -> None:
    """Neither one that sends nothing, which the library detects, nor one that trickles."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    here = source(server, tmp_path)
    resolution = await here.resolve(parse("a/public"), None) if is_known else None
    server.repositories["a/public"].trouble = Trouble.MUTE
    monkeypatch.setattr("lorikeet.adapters.sources.hub.TIMEOUTS_PER_ANSWER", timeouts)
    began = time.monotonic()
    if resolution is None:
        with pytest.raises(SourceUnreachable):
            await here.resolve(parse("a/public"), None)
    else:
        assert await here.resolve(parse("a/public"), None) == resolution
        server.repositories["a/public"].trouble = Trouble.SILENT
        with pytest.raises(SourceUnreachable):
            await here.small_files(resolution.pin, None)
    assert time.monotonic() - began < 5


async def test_a_full_disk_is_reported_as_such(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = source(server, tmp_path)
    pin = (await here.resolve(parse("a/public"), None)).pin

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "a secret place"))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(LoaderFailed, match=r"cannot be stored: No space left on device$") as caught:
        here.fetch(pin, None, tmp_path)
    assert caught.value.status == 503 and caught.value.retry_after

"""Adapters from an S3 server of another project, which runs in its own process on the loopback."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from lorikeet.adapters.errors import (
    AdapterChanged,
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    SourceUnreachable,
)
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.adapters.sources.listed import S3Source, is_below

pytestmark = pytest.mark.anyio

WEIGHTS = bytes(range(256)) * 4096


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A store that begins empty."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            answer = re.search(r"http://127\.0\.0\.1:\d+", line)
            if answer:
                break
        else:
            pytest.fail("the store did not start")
        yield answer[0]
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


@pytest.fixture
def account(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a server; credentials are where the library looks for them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return {"S3_ENDPOINT_URL": endpoint}


@pytest.fixture
def bucket(endpoint: str, account: dict[str, str]) -> S3Store:
    import urllib.request

    # A bucket is made by a request of its own, which the library does not have.
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/adapters", method="PUT")).close()
    store = S3Store("adapters", endpoint=endpoint, region="us-east-1", client_options={"allow_http": True}, prefix=None)
    for name, content in {
        "team/one/adapter_config.json": b"{}",
        "team/one/adapter_model.safetensors": WEIGHTS,
        "team/one/chat_template.jinja": b"{{ messages }}",
        "team/one/deeper/adapter_model.bin": b"never",
        "team/bare/adapter_config.json": b"{}",
    }.items():
        obstore.put(store, name, content)
    return store


def ref(id: str) -> Ref:
    return Ref(SourceKind.S3, id)


@pytest.mark.parametrize("id", ["adapters/team/one", "s3://adapters/team/one", "s3://adapters/team/one/"])
async def test_an_adapter_is_fetched(bucket: S3Store, account: dict[str, str], tmp_path: Path, id: str) -> None:
    source = S3Source(10_000_000, account)
    answer = await source.resolve(ref(id), None)
    folder = source.fetch(answer.pin, None, tmp_path)
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    }
    assert (folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (await source.small_files(answer.pin, None))["chat_template.jinja"] == b"{{ messages }}"


async def test_a_write_creates_a_new_version(bucket: S3Store, account: dict[str, str], tmp_path: Path) -> None:
    source = S3Source(10_000_000, account)
    pin = (await source.resolve(ref("adapters/team/one"), None)).pin
    obstore.put(bucket, "team/one/adapter_model.safetensors", b"others")
    assert (await source.resolve(ref("adapters/team/one"), None)).pin.revision != pin.revision
    with pytest.raises(AdapterChanged, match="has changed"):
        source.fetch(pin, None, tmp_path)


async def test_a_download_resumes(bucket: S3Store, account: dict[str, str], tmp_path: Path) -> None:
    source = S3Source(10_000_000, account)
    pin = (await source.resolve(ref("adapters/team/one"), None)).pin
    source.fetch(pin, None, tmp_path)
    whole = tmp_path / "adapter_model.safetensors"
    whole.unlink()
    objects = source._listed(pin.id)
    source._download(pin.id, objects["adapter_model.safetensors"].handle, whole)
    assert whole.read_bytes() == WEIGHTS
    # The state that an ended process leaves: half of the file, under the name of its version.
    names: list[str] = []
    replace = Path.replace

    def note(self: Path, target: Path) -> Path:
        names.append(self.name)
        return replace(self, target)

    whole.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", note)
        source._download(pin.id, objects["adapter_model.safetensors"].handle, whole)
    whole.unlink()
    half = bytearray(WEIGHTS[: len(WEIGHTS) // 2])
    half[0] ^= 255  # to see that it was not fetched again
    (tmp_path / names[0]).write_bytes(half)
    source._download(pin.id, objects["adapter_model.safetensors"].handle, whole)
    assert whole.read_bytes() == bytes(half) + WEIGHTS[len(half) :]


async def test_what_is_not_there(bucket: S3Store, account: dict[str, str], tmp_path: Path) -> None:
    source = S3Source(10_000_000, account)
    for id in ("adapters/none", "nobucket/x", "adapters/team/on", "", "/", "a b/c", "adapters/../x", ".", "./x", "-/x"):
        with pytest.raises(AdapterNotFound):
            await source.resolve(ref(id), None)
    pin = (await source.resolve(ref("adapters/team/bare"), None)).pin
    with pytest.raises(AdapterInvalid, match=r"holds no adapter_model\.safetensors"):
        source.fetch(pin, None, tmp_path)


async def test_sizes_are_checked_first(bucket: S3Store, account: dict[str, str], tmp_path: Path) -> None:
    source = S3Source(1000, account)
    pin = (await source.resolve(ref("adapters/team/one"), None)).pin
    with pytest.raises(AdapterTooLarge, match="this server accepts 1000"):
        source.fetch(pin, None, tmp_path)
    assert os.listdir(tmp_path) == []


async def test_a_store_that_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    source = S3Source(1000, {"S3_ENDPOINT_URL": "http://127.0.0.1:9"})
    with pytest.raises(SourceUnreachable) as caught:
        await source.resolve(ref("adapters/team/one"), None)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
async def test_credentials_without_access(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    from tests.hub_server import hub

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with hub({}) as refusing:
        refusing.status = status
        source = S3Source(1000, {"S3_ENDPOINT_URL": refusing.url})
        with pytest.raises(AdapterNotFound) as caught:
            await source.resolve(ref("adapters/team/one"), None)
        assert str(caught.value) == str(source.missing(ref("adapters/team/one"), None)), "as what does not exist"


async def test_lorax_s_bucket(bucket: S3Store, account: dict[str, str], tmp_path: Path) -> None:
    account |= {"PREDIBASE_MODEL_BUCKET": "adapters", "PREDIBASE_MODEL_FOLDER": "team/"}
    source = S3Source(10_000_000, account)
    pin = (await source.resolve(ref("one"), None)).pin
    assert (source.fetch(pin, None, tmp_path) / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert source.real_ids("one") == source.real_ids("s3://adapters/team/one") == {"adapters/team/one"}
    assert (await source.resolve(ref("s3://adapters/team/one"), None)).pin.revision == pin.revision


def test_prefixes_end_at_a_folder() -> None:
    for id in ("bucket/a/b", "bucket/a/b/c", "other/x"):
        assert is_below(id, ["s3://bucket/a/", "other"])
    for id in ("bucket/a", "bucket/ab/c", "other", "others/x", ""):
        assert not is_below(id, ["s3://bucket/a/", "other"])
    assert not is_below("bucket/a", [])


def test_cloudflare_s_store_is_found_by_its_account() -> None:
    source = S3Source(1000, {"R2_ACCOUNT_ID": "abc"})
    assert source._options["endpoint"] == "https://abc.r2.cloudflarestorage.com"


async def test_heads_come_before_the_weights(bucket: S3Store, account: dict[str, str], tmp_path: Path) -> None:
    source = S3Source(10_000_000, account)
    alone = {"config.json": b"{}", "medusa_lm_head.safetensors": b"heads"}
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    for folder, files in (("alone", alone), ("both", {**alone, **adapter})):
        for name, content in files.items():
            obstore.put(bucket, f"team/{folder}/{name}", content)
        pin = (await source.resolve(ref(f"adapters/team/{folder}"), None)).pin
        (tmp_path / folder).mkdir()
        fetched = source.fetch(pin, None, tmp_path / folder)
        assert {path.name: path.read_bytes() for path in fetched.iterdir()} == files
        assert next(iter(source.heads(pin, None, 3))) == "medusa_lm_head.safetensors"

"""Local adapters: everything below a root is found, and nothing else on the machine, for any path."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from lorikeet.adapters.errors import AdapterChanged, AdapterError, AdapterInvalid, AdapterNotFound, AdapterTooLarge
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.adapters.sources.listed import LocalSource
from tests import tiny
from tests.adapters import making

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make(folder: Path, weights: str = "weights", **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"adapter_config.json": "{}", "adapter_model.safetensors": weights, **files}.items():
        (folder / name).write_text(content)
    return folder


def source(*roots: Path, hidden: tuple[Path, ...] = (), limit: int = 1000) -> LocalSource:
    return LocalSource(roots, limit, hidden)


def ref(id: str | Path) -> Ref:
    return Ref(SourceKind.LOCAL, str(id))


async def test_an_adapter_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    folder = make(tmp_path / "root" / "team" / "a")
    local = source(tmp_path / "other", tmp_path / "root")
    by_name, by_path = await local.resolve(ref("team/a"), None), await local.resolve(ref(folder), "token")
    assert by_name.is_public and by_path.is_public
    assert by_name.pin.revision == by_path.pin.revision
    assert local.fetch(by_name.pin, None, tmp_path / "unused") == folder
    assert await local.small_files(by_name.pin, None) == {"adapter_config.json": b"{}"}


async def test_any_write_creates_a_new_version(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", "12345")
    local = source(tmp_path)
    revisions = {(await local.resolve(ref("a"), None)).pin.revision}
    make(folder, "54321")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    revisions.add((await local.resolve(ref("a"), None)).pin.revision)
    (folder / "chat_template.jinja").write_text("x")
    revisions.add((await local.resolve(ref("a"), None)).pin.revision)
    (folder / "chat_template.jinja").unlink()
    (folder / "new").write_text("12345")
    (folder / "new").replace(folder / "adapter_model.safetensors")
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    revisions.add((await local.resolve(ref("a"), None)).pin.revision)
    assert len(revisions) == 4


def replace_in_place(path: Path, content: bytes) -> None:
    """Write other bytes into the same inode, and set its times back."""
    before = path.stat()
    assert len(content) == before.st_size
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


async def test_equal_size_and_time_do_not_make_two_files_equal(tmp_path: Path) -> None:
    weights = make(tmp_path / "a", "12345") / "adapter_model.safetensors"
    local = source(tmp_path)
    before = (await local.resolve(ref("a"), None)).pin.revision
    await asyncio.sleep(0.05)  # the file system's clock has ticks
    replace_in_place(weights, b"54321")
    assert (await local.resolve(ref("a"), None)).pin.revision != before


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("position", ["start", "middle", "end"])
async def test_bytes_show_a_new_version_where_the_file_system_shows_none(
    strict: bool, position: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems that keep no time of change. Samples miss the middle of a large file."""
    weights = make(tmp_path / "a", "x" * 400_000) / "adapter_model.safetensors"
    local = LocalSource([tmp_path], 1 << 20, strict=strict)
    listed = local._listed("a")
    monkeypatch.setattr(local, "_listed", lambda id: listed)
    before = (await local.resolve(ref("a"), None)).pin.revision
    place = {"start": 0, "middle": 200_000, "end": 399_999}[position]
    weights.write_bytes(b"x" * place + b"y" + b"x" * (399_999 - place))
    is_new = (await local.resolve(ref("a"), None)).pin.revision != before
    assert is_new == (strict or position != "middle")


async def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--adapter"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    contents = {"adapter_config.json": "{}", "adapter_model.safetensors": "weights"}
    for number, (name, content) in enumerate(contents.items()):
        blob = repository / "blobs" / f"{number:064x}"
        blob.write_text(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "blobs" / "secret").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    (snapshot / "config.json").symlink_to(Path("../../blobs/secret"))
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "secret")
    for local, id in (
        (source(repository / "snapshots"), snapshot.name),
        (LocalSource([snapshot], 1000, folders=[snapshot]), str(snapshot)),
    ):
        pin = (await local.resolve(ref(id), None)).pin
        work = tmp_path / f"work-{len(id)}"
        work.mkdir()
        fetched = local.fetch(pin, None, work)
        assert {path.name: path.read_text() for path in fetched.iterdir()} == contents


async def test_a_pin_of_an_old_version_is_not_found(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    local = source(tmp_path)
    pin = (await local.resolve(ref("a"), None)).pin
    make(folder, "others")
    with pytest.raises(AdapterChanged, match="has changed"):
        local.fetch(pin, None, tmp_path)


async def test_paths_cannot_leave_a_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", make(tmp_path / "outside")
    inside = make(root / "a")
    make(tmp_path / "rootless")
    (root / "link").symlink_to(outside)
    (root / "parent").symlink_to("..")
    (root / "self").symlink_to(inside)
    local = source(root)
    ways = [outside, "../outside", "a/../../outside", "link", "parent/outside", f"{root}/../outside", "..", ".", "/"]
    for way in [*ways, "", root, "a/../a", f"{root}less", "a\0b", "x" * 5000, "/etc", "~", "a/adapter_config.json"]:
        with pytest.raises(AdapterNotFound):
            await local.resolve(ref(way), None)
    assert (await local.resolve(ref("self"), None)).pin.revision == (await local.resolve(ref("a"), None)).pin.revision


async def test_files_that_link_out_are_hidden(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = make(tmp_path / "root" / "a")
    for name in ("adapter_model.safetensors", "config.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
    local = source(tmp_path / "root")
    pin = (await local.resolve(ref("a"), None)).pin
    assert set(await local.small_files(pin, None)) == {"adapter_config.json"}
    with pytest.raises(AdapterInvalid, match=r"holds no adapter_model\.safetensors"):
        local.fetch(pin, None, tmp_path)


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "config.json"])
async def test_files_that_link_out_are_not_fetched(tmp_path: Path, name: str) -> None:
    """Readers of the folder would otherwise find it next to the chosen files."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = make(tmp_path / "root" / "a", **{"chat_template.jinja": "{{ }}"})
    (folder / "checkpoint-1").mkdir()
    local = source(tmp_path / "root")
    pin = (await local.resolve(ref("a"), None)).pin
    assert local.fetch(pin, None, tmp_path) == folder
    (folder / name).symlink_to(secret)
    pin = (await local.resolve(ref("a"), None)).pin
    (tmp_path / "own").mkdir()
    fetched = local.fetch(pin, None, tmp_path / "own")
    names = sorted(path.name for path in fetched.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"]


async def test_files_that_link_within_the_roots_are_served(tmp_path: Path) -> None:
    folder = make(tmp_path / "root" / "a")
    (tmp_path / "root" / "weights").write_text("elsewhere")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "root" / "weights")
    local = source(tmp_path / "root")
    pin = (await local.resolve(ref("a"), None)).pin
    (tmp_path / "own").mkdir()
    fetched = local.fetch(pin, None, tmp_path / "own")
    assert (fetched / "adapter_model.safetensors").read_text() == "elsewhere"


async def test_the_hubs_cache_and_the_store_are_never_local(tmp_path: Path) -> None:
    make(tmp_path / "models--owner--private" / "snapshots" / "0123")
    make(tmp_path / "store" / "x")
    (tmp_path / "link").symlink_to(tmp_path / "models--owner--private" / "snapshots" / "0123")
    local = source(tmp_path, hidden=(tmp_path / "store",))
    for way in ("models--owner--private/snapshots/0123", "link", "store/x", "store"):
        with pytest.raises(AdapterNotFound):
            await local.resolve(ref(way), None)


async def test_sizes_are_checked_first(tmp_path: Path) -> None:
    make(tmp_path / "a", "x" * 1001)
    local = source(tmp_path)
    pin = (await local.resolve(ref("a"), None)).pin
    with pytest.raises(AdapterTooLarge, match="1001 bytes; this server accepts 1000"):
        local.fetch(pin, None, tmp_path)


async def test_special_files_are_not_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    os.mkfifo(folder / "config.json")
    local = source(tmp_path)
    pin = (await local.resolve(ref("a"), None)).pin
    assert set(await local.small_files(pin, None)) == {"adapter_config.json"}


@given(id=st.text(alphabet="a./\\~%:\0 é-", max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_path_stays_inside_or_fails(tmp_path_factory: pytest.TempPathFactory, id: str) -> None:
    base = tmp_path_factory.getbasetemp() / "spelling"
    make(base / "aa")
    make(base / "root" / "a")
    local = source(base / "root")
    try:
        folder, files = local._folder(id), local._listed(id)
    except AdapterError as error:
        assert isinstance(error, AdapterNotFound)
    else:
        assert folder.is_relative_to(base / "root") and folder != base / "root"
        assert all(file.handle.is_relative_to(base / "root") for file in files.values())


def test_names_and_their_descriptions_stay_inside_the_roots(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", make(tmp_path / "outside", **{"README.md": "Secret."})
    make(root / "a", **{"README.md": "---\ntags: [x]\n---\n# A\n\nAnswers\nquestions."})
    make(root / "b")
    (root / "b" / "README.md").symlink_to(outside / "README.md")
    (root / "c").symlink_to(outside)
    (root / "d").mkdir()
    make(root / ".e")
    make(root / "f")
    os.mkfifo(root / "f" / "README.md")
    make(root / "g")
    local = source(tmp_path / "absent", root, hidden=(root / "g",))
    assert local.names() == {"a": "Answers questions.", "b": "", "f": ""}


def test_the_template_that_peft_saves_describes_nothing(tmp_path: Path) -> None:
    base = tiny.make("llama", tmp_path / "base")
    adapter = making.make_adapter(base, tmp_path / "root" / "a", LoraConfig(r=2, target_modules=["q_proj"]))
    local = source(tmp_path / "absent", tmp_path / "root")
    assert local.names() == {"a": ""}
    card = adapter / "README.md"
    card.write_text(card.read_text().replace("## Uses", "Writes SQL.\n\n## Uses", 1))
    assert local.names() == {"a": "Writes SQL."}

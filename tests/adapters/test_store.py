"""The disk tier: order of removal, protected files, and concurrent processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorikeet.adapters.errors import AdapterTooLarge, LoaderFailed, StoreFull
from lorikeet.adapters.formats import header
from lorikeet.adapters.refs import Pin, SourceKind
from lorikeet.adapters.store import MERGES_PART, RECENT_MERGE_S, RECENT_S, Entry, Store
from lorikeet.proto.digest import CHECKSUM_FIELD, CHECKSUM_UNKNOWN, with_checksum

BASE = ("base", "weights", "float32")
ROOT = Path(__file__).parents[2]


def digest(number: int) -> str:
    return f"{number:064x}"


def content(num_values: int = 256, base: tuple[str, str, str] = BASE) -> bytes:
    metadata = {"base": base[0], "weights": base[1], "dtype": base[2], "rank": "4", "modules": "{}"}
    values = memoryview(bytes(4 * num_values))
    head, _ = header.compose({"x": ("F32", (num_values,))}, {**metadata, CHECKSUM_FIELD: CHECKSUM_UNKNOWN})
    return with_checksum(head, [values]) + values


def add(store: Store, number: int, num_values: int = 256, base: tuple[str, str, str] = BASE) -> int:
    """Store a file now; its size."""
    file = content(num_values, base)
    return store.add(digest(number), len(file), lambda to: to.write(file))


def put(store: Store, number: int, age_s: float = RECENT_S + 1, num_values: int = 256) -> int:
    """Store a file that was last asked for some time ago; its size."""
    size = add(store, number, num_values)
    age(store, number, age_s)
    return size


def age(store: Store, number: int, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(store.path(digest(number)), (then, then))


def pin(number: int) -> Pin:
    return Pin(SourceKind.LOCAL, f"a{number}", "r")


def test_the_least_recently_used_file_is_removed_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 40, BASE)
    sizes = [put(store, number, age_s=1000 - number) for number in range(4)]
    age(store, 0, 200)  # asked for after the others
    small = Store(tmp_path, sum(sizes), BASE)
    add(small, 9)
    assert [number for number in range(4) if small.path(digest(number)).exists()] == [0, 2, 3]
    assert small.num_evicted == 1


def test_the_capacity_is_never_exceeded(tmp_path: Path) -> None:
    """Files that were used lately stay, and new ones are refused."""
    capacity = 3 * len(content())
    store = Store(tmp_path, capacity, BASE)
    for number in range(3):
        put(store, number, age_s=RECENT_S / 2)
    with pytest.raises(StoreFull, match="--adapter-disk-cache") as refused:
        add(store, 3)
    assert refused.value.status == 503 and refused.value.retry_after
    age(store, 1, RECENT_S + 1)
    assert store.touch(digest(1))  # so it is recent again
    with pytest.raises(StoreFull):
        add(store, 3)
    age(store, 1, RECENT_S + 1)
    add(store, 3)
    assert not store.touch(digest(1)) and store.usage() == (3, capacity)
    with pytest.raises(AdapterTooLarge, match=f"the adapter cache has {capacity}"):
        add(store, 4, num_values=capacity)
    assert not list((tmp_path / "work").iterdir())


def test_files_that_are_being_written_count_until_their_writer_ends(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.adapters.test_store import *\n"
        "def slowly(file): print('writing', flush=True); sys.stdin.read()\n"
        "Store(sys.argv[1], 1 << 30, BASE).add(digest(1), 1000, slowly)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdin is not None and writer.stdout is not None
    assert writer.stdout.readline() == b"writing\n"
    store = Store(tmp_path, len(content()) + 999, BASE)
    with pytest.raises(StoreFull):
        add(store, 2)
    writer.kill()
    writer.wait()
    writer.stdin.close()
    writer.stdout.close()
    add(store, 2)
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("where", ["writing", "downloading", "a folder"])
def test_a_full_disk_makes_room(tmp_path: Path, where: str) -> None:
    """The least recently used file is removed, and the write is repeated."""
    store, num_free = Store(tmp_path, 1 << 30, BASE), 0
    for number, age_s in ((1, 1000), (2, 2000), (3, 10)):
        put(store, number, age_s)

    def write() -> None:
        if store.usage()[0] > num_free:
            raise OSError(28, "No space left on device")

    def into(file: BinaryIO) -> None:
        file.write(content())
        write()

    num_free = 2
    if where == "writing":
        store.add(digest(4), len(content()), into)
        assert store.touch(digest(4))
    elif where == "downloading":
        store.retried(write)
    else:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Path, "mkdir", lambda *_, **__: write())
            store.work("a name")
    assert [store.touch(digest(number)) for number in (1, 2, 3)] == [True, False, True]
    num_free = 0
    age(store, 1, 1000)
    with pytest.raises(StoreFull, match="No space left"):  # one is too recent
        store.retried(write)
    assert [store.touch(digest(number)) for number in (1, 3)] == [False, True]


def test_a_file_that_does_not_match_its_checksum_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    for number in range(4):
        put(store, number)
        assert store.is_intact(digest(number)) and store.verify(digest(number))
    later = Store(tmp_path, 1 << 30, BASE)
    assert not later.is_intact(digest(0)) and later.verify(digest(0)) and later.is_intact(digest(0))
    assert later.hold(digest(1))
    for number, place in ((1, -1), (2, -1000), (3, 60)):  # values, and the header
        path = store.path(digest(number))
        damaged = bytearray(path.read_bytes())
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert not later.verify(digest(number)) and not path.exists()
    assert not later.verify(digest(1))
    add(store, 1)
    later.renew_hold(digest(1))
    age(store, 1, 1e6)
    with pytest.raises(StoreFull):
        add(Store(tmp_path, len(content()), BASE), 5)
    assert store.touch(digest(1)), "the new file is held"


def test_files_held_by_another_process_stay(tmp_path: Path) -> None:
    store = Store(tmp_path, len(content()), BASE)
    put(store, 1)
    script = (
        "import sys\n"
        "from lorikeet.adapters.store import Store\ns = Store(sys.argv[1], 1, ('base', 'weights', 'float32'))\n"
        "print(s.hold(sys.argv[2]), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path), digest(1)]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"True\n"
    with pytest.raises(StoreFull):
        put(store, 2)
    assert store.path(digest(1)).exists()
    assert not store.remove(digest(1))
    holder.stdin.close()
    holder.stdout.close()
    holder.wait()
    put(store, 3)
    assert not store.path(digest(1)).exists()


def test_a_held_file_stays_held_when_it_is_written_again(tmp_path: Path) -> None:
    store = Store(tmp_path, 2000, BASE)
    add(store, 1, 1)
    assert store.hold(digest(1))
    add(store, 1, 124)
    age(store, 1, 1e6)
    with pytest.raises(StoreFull):
        add(store, 2, 293)
    assert store.touch(digest(1))
    store.release(digest(1))
    age(store, 1, 1e6)
    add(store, 3, 293)
    assert not store.touch(digest(1))


def test_a_pins_entry_is_recorded_per_base(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    entry = Entry(digest(1), put(store, 1), 4)
    store.note(pin(1), entry)
    assert Store(tmp_path, 1 << 30, BASE).of_pin(pin(1)) == entry
    for other in (("other", *BASE[1:]), (BASE[0], "other", BASE[2]), (*BASE[:2], "bfloat16")):
        foreign = Store(tmp_path, 1 << 30, other)
        assert foreign.of_pin(pin(1)) is None
        assert not foreign.touch(digest(1))
    assert store.of_pin(pin(2)) is None
    store.remove(digest(1))
    assert store.of_pin(pin(1)) is None


def test_a_file_of_another_base_under_the_same_digest_is_ignored(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    put(store, 1)
    assert store.touch(digest(1))
    add(Store(tmp_path, 1 << 30, ("other", "", "")), 1, base=("other", "", ""))
    assert not store.touch(digest(1))


@pytest.mark.parametrize("damage", ["truncated", "grown", "noise", "empty", "gone"])
def test_a_damaged_file_is_ignored(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    put(store, 1)
    path = store.path(digest(1))
    before = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        damaged = {"truncated": before[:-9], "grown": before + b"x", "noise": b"\x80" * len(before), "empty": b""}
        path.write_bytes(damaged[damage])
    assert not Store(tmp_path, 1 << 30, BASE).touch(digest(1))
    with pytest.raises(LoaderFailed):
        store.entry(digest(1))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)

    def full(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(LoaderFailed, match="No space left") as failed:
        store.add(digest(1), 4, full)
    assert failed.value.status == 503
    assert store.usage() == (0, 0) and not list((tmp_path / "work").iterdir())


def test_a_full_disk_only_skips_the_record_of_a_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    entry = Entry(digest(1), add(store, 1), 4)

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        store.note(pin(1), entry)
        patched.setattr(Path, "mkdir", full)
        with pytest.raises(LoaderFailed, match="No space left") as failed:
            store.work("a name")
    assert failed.value.status == 503
    assert store.of_pin(pin(1)) is None and not list((tmp_path / "pins").iterdir())
    store.note(pin(1), entry)
    assert store.of_pin(pin(1)) == entry


@pytest.mark.parametrize("name", ["", "..", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "/x", "0" * 64 + "\n"])
def test_only_digests_are_file_names(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path, 1, BASE)
    for use in (store.path, store.touch, store.hold, store.remove, store.entry):
        with pytest.raises(ValueError, match="not a digest"):
            use(name)


def test_leftovers_of_earlier_processes_are_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    store.note(pin(1), Entry(digest(1), 1, 1))  # whose file is not here
    put(store, 2)
    store.note(pin(2), Entry(digest(2), 1, 1))
    fresh, old = store.work("fresh"), store.work("old")
    (old / "part").write_bytes(b"x")
    os.utime(old, (1, 1))
    (tmp_path / "pins" / "broken.json").write_text("{")
    store.sweep()
    assert fresh.exists() and not old.exists()
    assert store.of_pin(pin(2)) is not None and len(list((tmp_path / "pins").iterdir())) == 1


def test_many_processes_write_at_once_within_the_capacity(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from tests.adapters.test_store import *\n"
        "store = Store(sys.argv[1], 16 * 1200, BASE)\n"
        "number = 0\n"
        "while number < 40:\n"
        " try: put(store, int(sys.argv[2]) * 20 + number); number += 1\n"
        " except StoreFull: time.sleep(0.001)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    store = Store(tmp_path, 16 * 1200, BASE)
    # another process's file is recent for the moment before its age is set, so that there is no room for that moment
    assert 0 < store.usage()[1] <= 16 * 1200
    assert all(store.touch(path.stem) for path in tmp_path.glob("*.safetensors"))
    assert not list((tmp_path / "work").iterdir())


class StoreMachine(RuleBasedStateMachine):
    """Against a model: a set of digests with the time each was last asked for."""

    @initialize(capacity=st.integers(2000, 6000))
    def begin(self, capacity: int) -> None:
        import tempfile

        self.capacity = capacity
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(self.folder.name, capacity, BASE)
        self.clock = 0
        self.there: dict[int, tuple[int, int]] = {}
        self.held: set[int] = set()

    def tick(self, number: int) -> int:
        """Everything happened long ago, in this order."""
        self.clock += 1
        age(self.store, number, 1e6 - self.clock)
        return self.clock

    @rule(number=st.integers(0, 9), num_values=st.integers(1, 400))
    def add(self, number: int, num_values: int) -> None:
        size = len(content(num_values))
        left = dict(self.there)
        excess = sum(size for size, _ in left.values()) + size - self.capacity
        for digest, (num_bytes, _) in sorted(self.there.items(), key=lambda item: item[1][1]):
            if excess > 0 and digest not in self.held:
                del left[digest]
                excess -= num_bytes
        if excess > 0:
            with pytest.raises(StoreFull):
                add(self.store, number, num_values)
        else:
            assert add(self.store, number, num_values) == size
            self.there = {**left, number: (size, self.tick(number))}

    @rule(number=st.integers(0, 9))
    def touch(self, number: int) -> None:
        assert self.store.touch(digest(number)) == (number in self.there)
        if number in self.there:
            self.there[number] = (self.there[number][0], self.tick(number))

    @rule(number=st.integers(0, 9))
    def hold(self, number: int) -> None:
        if self.store.hold(digest(number)):
            self.held.add(number)
        assert (number in self.held) == (number in self.there)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard(number)
        self.store.release(digest(number))

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        assert self.store.remove(digest(number))
        self.there.pop(number, None)
        self.held.discard(number)

    @invariant()
    def the_files_are_those_of_the_model(self) -> None:
        digests = {int(path.stem, 16) for path in Path(self.folder.name).glob("*.safetensors")}
        assert digests == set(self.there)
        assert self.store.usage() == (len(self.there), sum(size for size, _ in self.there.values()))

    def teardown(self) -> None:
        for number in self.held:
            self.store.release(digest(number))
        self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_an_entry_is_read_from_the_file_itself(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    size = put(store, 1)
    assert store.entry(digest(1)) == Entry(digest(1), size, 4)
    assert Entry.from_dict(json.loads(json.dumps(store.entry(digest(1)).as_dict()))) == store.entry(digest(1))


def merge(store: Store, number: int, caller: str, age_s: float = RECENT_MERGE_S + 1) -> None:
    file = content()
    store.add(digest(number), len(file), lambda to: to.write(file), caller)
    age(store, number, age_s)


def kept(store: Store) -> list[int]:
    return [number for number in range(1, 40) if store.path(digest(number)).exists()]


def test_merges_of_a_caller_have_a_part_of_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path, 8 * len(content()), BASE)
    put(store, 1)
    for number in range(2, 30):
        merge(store, number, "flood")
    assert kept(store) == [1, 28, 29] and MERGES_PART == 4
    merge(store, 30, "another")
    assert kept(store) == [1, 28, 29, 30]
    assert sorted(path.name for path in (tmp_path / "merges").iterdir()) == sorted(map(digest, (28, 29, 30)))


def test_merges_that_are_in_use_leave_a_caller_no_more(tmp_path: Path) -> None:
    store = Store(tmp_path, 8 * len(content()), BASE)
    merge(store, 1, "flood", age_s=0)
    merge(store, 2, "flood", age_s=0)
    with pytest.raises(StoreFull, match=f"merges of one caller may take {2 * len(content())} bytes"):
        merge(store, 3, "flood")
    merge(store, 3, "another")
    assert kept(store) == [1, 2, 3]
    assert not list((tmp_path / "work").iterdir())


def test_merges_go_before_adapters(tmp_path: Path) -> None:
    """Many callers, as many addresses of one attacker, fill the folder with merges; adapters of others find room."""
    store = Store(tmp_path, 8 * len(content()), BASE)
    put(store, 1, age_s=1000)
    for number in range(2, 9):
        merge(store, number, f"flood {number}")
    for number in range(9, 13):
        put(store, number, age_s=0)
    assert kept(store) == [1, 6, 7, 8, 9, 10, 11, 12]
    with pytest.raises(StoreFull, match="full of adapters in use"):
        for number in range(13, 18):
            put(store, number, age_s=0)
    assert kept(store) == [9, 10, 11, 12, 13, 14, 15, 16]


def test_a_merge_larger_than_its_callers_part_replaces_the_others(tmp_path: Path) -> None:
    store = Store(tmp_path, 3 * len(content()), BASE)
    merge(store, 1, "one")
    merge(store, 2, "one")
    assert kept(store) == [2]

"""The disk tier: order of removal, protected files, and concurrent processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import save_file

from lorikeet.adapters.errors import LoaderFailed
from lorikeet.adapters.refs import Pin, Source
from lorikeet.adapters.store import RECENT_S, Entry, Store

BASE = ("base", "weights", "float32")
ROOT = Path(__file__).parents[2]


def digest(number: int) -> str:
    return f"{number:064x}"


def fill(path: Path, num_values: int = 256, base: tuple[str, str, str] = BASE) -> None:
    metadata = {"base": base[0], "weights": base[1], "dtype": base[2], "rank": "4", "modules": "{}"}
    save_file({"x": torch.zeros(num_values)}, path, metadata=metadata)


def put(store: Store, number: int, age_s: float = RECENT_S + 1, num_values: int = 256) -> int:
    """Store a file that was last asked for some time ago; its size."""
    size = store.add(digest(number), lambda path: fill(path, num_values))
    age(store, number, age_s)
    return size


def age(store: Store, number: int, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(store.path(digest(number)), (then, then))


def pin(number: int) -> Pin:
    return Pin(Source.LOCAL, f"a{number}", "r")


def test_the_least_recently_used_file_is_removed_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 40, BASE)
    sizes = [put(store, number, age_s=1000 - number) for number in range(4)]
    age(store, 0, 200)  # asked for after the others
    small = Store(tmp_path, sum(sizes), BASE)
    small.add(digest(9), fill)
    assert [number for number in range(4) if small.path(digest(number)).exists()] == [0, 2, 3]
    assert small.num_evicted == 1


def test_recently_used_files_stay_even_above_the_capacity(tmp_path: Path) -> None:
    store = Store(tmp_path, 1, BASE)
    for number in range(3):
        put(store, number, age_s=RECENT_S / 2)
    assert store.usage()[0] == 3
    age(store, 1, RECENT_S + 1)
    assert store.touch(digest(1))  # so it is recent again
    put(store, 3)
    assert store.usage()[0] == 4


def test_files_held_by_another_process_stay(tmp_path: Path) -> None:
    store = Store(tmp_path, 1, BASE)
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
    store.add(digest(1), lambda path: fill(path, 1))
    assert store.hold(digest(1))
    store.add(digest(1), lambda path: fill(path, 124))
    age(store, 1, 1e6)
    store.add(digest(2), lambda path: fill(path, 293))
    assert store.touch(digest(1))
    store.release(digest(1))
    age(store, 1, 1e6)
    store.add(digest(3), lambda path: fill(path, 293))
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
    Store(tmp_path, 1 << 30, ("other", "", "")).add(digest(1), lambda path: fill(path, base=("other", "", "")))
    assert not store.touch(digest(1))


@pytest.mark.parametrize("damage", ["truncated", "grown", "noise", "empty", "gone"])
def test_a_damaged_file_is_ignored(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    put(store, 1)
    path = store.path(digest(1))
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        damaged = {"truncated": content[:-9], "grown": content + b"x", "noise": b"\x80" * len(content), "empty": b""}
        path.write_bytes(damaged[damage])
    assert not Store(tmp_path, 1 << 30, BASE).touch(digest(1))
    with pytest.raises(LoaderFailed):
        store.entry(digest(1))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 30, BASE)

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(LoaderFailed, match="No space left") as failed:
        store.add(digest(1), full)
    assert failed.value.status == 503
    assert store.usage() == (0, 0) and not list((tmp_path / "work").iterdir())


def test_a_full_disk_only_skips_the_record_of_a_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1 << 30, BASE)
    entry = Entry(digest(1), put(store, 1), 4)

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
        "for number in range(40): put(store, int(sys.argv[2]) * 20 + number)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    store = Store(tmp_path, 16 * 1200, BASE)
    # another process's file is recent for the moment before its age is set
    assert 0 < store.usage()[0] <= 19
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
        size = self.store.add(digest(number), lambda path: fill(path, num_values))
        before = dict(self.there)
        excess = sum(size for size, _ in before.values()) + size - self.capacity
        for each, (num_bytes, _) in sorted(before.items(), key=lambda item: item[1][1]):
            if excess <= 0:
                break
            if each not in self.held:
                del self.there[each]
                excess -= num_bytes
        self.there[number] = (size, self.tick(number))

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
        found = {int(path.stem, 16) for path in Path(self.folder.name).glob("*.safetensors")}
        assert found == set(self.there)
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

"""What survives a restart of a shard that learns, and what a purge deletes."""

import fcntl
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorikeet.proto.learning import RowsLayout
from lorikeet.shard.learning import learning as module
from lorikeet.shard.learning.learning import LearnedPair, Learning, Records, Rings
from lorikeet.shard.scheduler.adapter_slots import Residency

BASE = ("configuration", "weights", "float32")
GIVEN, FIRST, SECOND, THIRD = (letter * 64 for letter in "0123")
PAIR = ("one", "")


def adopted(given_digest: str = "", replaced: str = FIRST) -> LearnedPair:
    """A pair that has adopted SECOND."""
    pair = LearnedPair(PAIR)
    pair.given_digest = given_digest
    pair.state.heads_digest, pair.state.replaced_digest, pair.state.replaced_acceptance = SECOND, replaced, 0.5
    pair.state.decisions.add(time=1.0, decision="adopted", reason="better", heads_digest=SECOND)
    return pair


def pair_with(tenant: str, given_digest: str = "", digest: str = "") -> LearnedPair:
    """A pair without decisions."""
    pair = LearnedPair((tenant, ""))
    pair.given_digest, pair.state.heads_digest = given_digest, digest
    return pair


class Adapters:
    """Those of a scheduler that has none."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    def unload(self, digest: str) -> None:
        self.unloaded.append(digest)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    for digest in (GIVEN, FIRST, SECOND, THIRD):
        (tmp_path / f"{digest}.safetensors").write_text("heads")
    return Records(tmp_path, BASE)


def learning_of(records: Records) -> Learning:
    """What a shard has learned after a start."""
    scheduler: Any = SimpleNamespace(adapters=Adapters(), swap_heads=lambda pair, digest: None)
    trainer: Any = SimpleNamespace(state="stopped", training_s=0.0, stop=lambda: None)
    return Learning(scheduler, Rings(RowsLayout(4, 8)), records, trainer)


def is_locked(root: Path, digest: str) -> bool:
    """Whether a process keeps heads in the store."""
    descriptor = os.open(root / f"{digest}.safetensors", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def left(root: Path) -> set[str]:
    return {path.stem for path in root.glob("*.safetensors")}


def saved(records: Records, *pairs: LearnedPair) -> None:
    for pair in pairs:
        records.write(pair)


def test_a_record_is_read_as_it_was_written(records: Records, tmp_path: Path) -> None:
    pair = adopted(given_digest=GIVEN)
    saved(records, pair)
    assert records.read() == [(GIVEN, pair.state)]
    assert Records(tmp_path, ("other", "base", "float32")).read() == []


def test_a_purge_deletes_learned_heads_and_leaves_those_that_requests_came_with(
    records: Records, tmp_path: Path
) -> None:
    replaced_given = adopted(given_digest=GIVEN, replaced=GIVEN)
    other = pair_with("two", given_digest=FIRST)  # what one learned, two was given
    saved(records, replaced_given, other)
    records.purge()
    assert left(tmp_path) == {GIVEN, FIRST, THIRD}
    assert not list((tmp_path / "learning").iterdir())


def test_a_purge_reads_more_files_than_a_start(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PAIRS", 1)
    saved(records, *(pair_with(str(n), digest=digest) for n, digest in enumerate((FIRST, SECOND, THIRD))))
    assert len(records.read()) == 1
    records.purge()
    assert left(tmp_path) == {GIVEN}
    assert not list((tmp_path / "learning").iterdir())


def test_a_purge_of_a_shard_leaves_given_heads(records: Records, tmp_path: Path) -> None:
    saved(records, adopted(given_digest=GIVEN, replaced=GIVEN))
    learning = learning_of(records)
    learning.answer(purge=True)
    adapters: Any = learning._scheduler.adapters
    assert adapters.unloaded == [SECOND]
    assert left(tmp_path) == {GIVEN, FIRST, THIRD}


def test_a_decision_does_not_wait_for_the_disk(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(records, adopted())
    learning = learning_of(records)
    is_disk_free, write_text, unlink = threading.Event(), Path.write_text, Path.unlink

    def write_late(path: Path, text: str) -> int:
        assert is_disk_free.wait(5), "the step loop waits for the disk"
        return write_text(path, text)

    def unlink_late(path: Path, missing_ok: bool = False) -> None:
        assert is_disk_free.wait(5), "the step loop waits for the disk"
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "write_text", write_late)
    monkeypatch.setattr(Path, "unlink", unlink_late)
    learning.changed(SECOND, Residency.FAILED, "it is damaged")
    assert left(tmp_path) == {GIVEN, FIRST, SECOND, THIRD}
    is_disk_free.set()
    assert records.read() == [("", learning.pairs[PAIR].state)]
    assert left(tmp_path) == {GIVEN, THIRD}


def test_a_restart_keeps_the_heads_in_use_and_those_before_in_the_store(records: Records, tmp_path: Path) -> None:
    saved(records, adopted())
    learning = learning_of(records)
    state = learning.pairs[PAIR].state
    assert (state.heads_digest, state.replaced_digest) == (SECOND, FIRST)
    assert [is_locked(tmp_path, digest) for digest in (GIVEN, FIRST, SECOND)] == [False, True, True]


def test_given_heads_are_not_kept_in_the_store(records: Records, tmp_path: Path) -> None:
    saved(records, adopted(given_digest=GIVEN, replaced=GIVEN))
    learning = learning_of(records)
    pair = learning.pairs[PAIR]
    assert (pair.given_digest, pair.state) == records.read()[0]
    assert [is_locked(tmp_path, digest) for digest in (GIVEN, SECOND)] == [False, True]


def test_a_forgotten_pair_keeps_nothing_in_the_store(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(records, adopted())
    learning = learning_of(records)
    monkeypatch.setattr(module, "MAX_PAIRS", 1)
    learning._pair(("two", ""))
    assert list(learning.pairs) == [("two", "")]
    assert not any(is_locked(tmp_path, digest) for digest in (FIRST, SECOND))


def test_heads_that_left_the_store_are_reported(records: Records, tmp_path: Path) -> None:
    saved(records, adopted())
    (tmp_path / f"{SECOND}.safetensors").unlink()
    learning = learning_of(records)
    (pair,) = learning.answer(purge=False).pairs
    assert (pair.heads_digest, pair.replaced_digest) == ("", "")
    last = pair.decisions[-1]
    assert (last.decision, last.heads_digest) == ("failed", SECOND)
    assert last.reason == "the learned heads are no longer in the adapter store"
    assert learning.totals.num_failed == 1
    records.flush()
    assert left(tmp_path) == {GIVEN, THIRD}  # nothing uses those before
    again = learning_of(records)  # it is said once
    assert list(again.answer(purge=False).pairs[0].decisions) == list(pair.decisions)


def test_given_heads_outlive_learned_ones_that_left_the_store(records: Records, tmp_path: Path) -> None:
    saved(records, adopted(given_digest=GIVEN, replaced=GIVEN))
    (tmp_path / f"{SECOND}.safetensors").unlink()
    learning_of(records)
    records.flush()
    assert left(tmp_path) == {GIVEN, FIRST, THIRD}


def test_heads_that_cannot_be_loaded_leave_the_store_with_those_before(records: Records, tmp_path: Path) -> None:
    saved(records, adopted())
    learning = learning_of(records)
    learning.changed(SECOND, Residency.FAILED, "it is damaged")
    assert learning.pairs[PAIR].state.decisions[-1].decision == "failed"
    records.flush()
    assert left(tmp_path) == {GIVEN, THIRD}


def test_what_drafted_before_follows_the_heads_that_requests_come_with(records: Records) -> None:
    saved(records, adopted(given_digest=GIVEN, replaced=GIVEN))
    pair = learning_of(records).pairs[PAIR]
    pair.came_with(THIRD)
    assert (pair.given_digest, pair.state.replaced_digest) == (THIRD, THIRD)
    pair.state.replaced_digest = FIRST
    pair.came_with("")
    assert (pair.given_digest, pair.state.replaced_digest) == ("", FIRST)

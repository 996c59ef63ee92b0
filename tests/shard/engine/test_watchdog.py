"""What the watch sees of a step loop: that it has served, and that a step hangs."""

import os
import time
from pathlib import Path

import pytest

from lorikeet.shard.engine.engine import STUCK_EXIT, Watchdog
from tests.shard.rig import Rig, make_request


def test_a_mark_appears_once_a_request_was_completed(tmp_path: Path) -> None:
    rig, mark = Rig(), tmp_path / "served"
    rig.engine.warm_up()
    watch = Watchdog(rig.engine, str(mark), 0)
    watch.poll()
    assert not mark.exists()
    rig.submit(make_request(1, [1, 2], 2))
    rig.step()
    watch.poll()
    assert not mark.exists()
    rig.step()
    watch.poll()
    assert mark.exists()
    mark.unlink()
    watch.poll()
    assert not mark.exists()


@pytest.mark.parametrize(("timeout_s", "age_s", "ends"), [(1.0, 1.5, True), (1.0, 0.5, False), (0.0, 9.0, False)])
def test_a_step_that_hangs_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, age_s: float, ends: bool
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    rig = Rig()
    watch = Watchdog(rig.engine, None, timeout_s)
    watch.poll()
    assert codes == []
    rig.engine.running_step = (7, time.monotonic() - age_s)
    watch.poll()
    assert codes == ([STUCK_EXIT] if ends else [])

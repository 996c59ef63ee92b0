import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorikeet.adapters.errors import SourceUnreachable
from lorikeet.adapters.loader.worker import WorkerJobs
from lorikeet.adapters.refs import Pin, SourceKind
from lorikeet.adapters.sources.base import Within
from lorikeet.adapters.store import Store

LONGEST_S = 20.0


class Slow:
    """A source that is never silent and never done."""

    def fetch(self, pin: Pin, token: str | None, folder: Path, within: Within) -> Path:
        within(60.0)
        within(0.2)
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            time.sleep(0.01)
        return folder


@pytest.fixture
def alarms() -> Iterator[None]:
    earlier = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, earlier)


@pytest.mark.usefixtures("alarms")
def test_a_fetch_ends_at_the_time_limit_of_its_source(tmp_path: Path) -> None:
    jobs = object.__new__(WorkerJobs)  # a base is not needed to fetch
    jobs._store = Store(tmp_path / "store", 1, ("base", "weights", "float32"))
    jobs._sources = {SourceKind.HUB: Slow()}  # type: ignore[assignment]
    began = time.monotonic()
    with pytest.raises(SourceUnreachable, match="the source of a/slow takes too long to answer"):
        jobs.fetch({"pin": Pin(SourceKind.HUB, "a/slow", "main").as_dict(), "folder": str(tmp_path)})
    assert time.monotonic() - began < LONGEST_S / 2

"""SIGHUP ends the launcher, reloads files, or is ignored under nohup."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from lorikeet.launcher.processes.supervisor import Signals


@pytest.fixture
def nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def terminal() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sighup_ends_the_server(terminal: None) -> None:
    with Signals().caught() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.wait(1.0), signals.take(signal.SIGHUP)) == ("SIGHUP", 0)


def test_sighup_is_ignored_under_nohup(nohup: None) -> None:
    with Signals().caught() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.wait(0.0), signals.take(signal.SIGHUP)) == (None, 0)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("how", ["nohup", "terminal"])
def test_sighup_reloads_files_in_both_cases(how: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(how)
    with Signals().caught() as signals:
        signals.reloads = True
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.wait(0.0), signals.take(signal.SIGHUP)) == (None, 1)


class SlowSignals(Signals):
    """Its handler takes longer than a wait, as on a busy machine."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        time.sleep(0.15)
        super()._note(number, frame)


def test_a_wait_ends_after_a_handler_that_took_longer() -> None:
    with SlowSignals().caught() as signals:
        signals.reloads = True
        later = [threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGHUP])]
        later += [threading.Timer(3.0, os.kill, [os.getpid(), signal.SIGTERM])]
        for timer in later:
            timer.start()
        try:
            assert signals.wait(0.1) is None
        finally:
            for timer in later:
                timer.cancel()
        assert signals.take(signal.SIGHUP) == 1

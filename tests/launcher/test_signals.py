"""What SIGHUP asks of a launcher: an end, files to be read again, or nothing under nohup."""

import os
import signal
from collections.abc import Iterator

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


def test_it_ends_with_its_terminal(terminal: None) -> None:
    with Signals().caught() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.wait(1.0), signals.take(signal.SIGHUP)) == ("SIGHUP", 0)


def test_under_nohup_it_stays(nohup: None) -> None:
    with Signals().caught() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.wait(0.0), signals.take(signal.SIGHUP)) == (None, 0)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("how", ["nohup", "terminal"])
def test_files_are_read_again_either_way(how: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(how)
    with Signals().caught() as signals:
        signals.reloads = True
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.wait(0.0), signals.take(signal.SIGHUP)) == (None, 1)

"""Progress of a download as log lines."""

import logging
import time
from pathlib import Path

import pytest

from lorikeet.launcher.models import hub
from lorikeet.proto.logs import readable_size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (6500, "6.5 kB"), (1_500_000, "1.5 MB"), (14_483_000_000, "14.5 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert readable_size(count) == text


def test_progress_is_logged_until_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "a").write_bytes(b"x" * 6000)
    with hub.logged(tmp_path, 12_000, logging.getLogger("tests.progress"), interval_s=0.01):
        end = time.monotonic() + 30
        while not caplog.messages and time.monotonic() < end:
            time.sleep(0.01)
    assert caplog.messages[0] == "download_progress: fetched 6.0 kB of 12.0 kB"
    said = len(caplog.messages)
    time.sleep(0.05)
    assert len(caplog.messages) == said

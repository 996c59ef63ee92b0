"""An adapter that is requested is read, or fails with a reason."""

from pathlib import Path

import pytest

from lorikeet.shard.adapters.manager import AdapterReader
from lorikeet.shard.grpc.streams import AdapterRead, Inbox
from lorikeet.shard.scheduler.adapter_slots import NOT_HERE, Content


def read(path: Path) -> Content:
    text = path.read_text()
    if text == "invalid":
        raise ValueError("it is invalid")
    if text == "broken":
        raise KeyError("secret")
    raise AssertionError(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, NOT_HERE), ("invalid", "it is invalid"), ("broken", "the adapter could not be read: KeyError")],
)
def test_an_adapter_that_cannot_be_read_fails_with_a_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "d.safetensors").write_text(text)
    inbox = Inbox()
    AdapterReader(tmp_path, read, inbox).request("d")
    inbox.wait(20)
    assert inbox.drain() == [AdapterRead("d", None, reason)]

"""What becomes of an adapter that is asked for: read, or the reason why not."""

from pathlib import Path

import pytest

from lorikeet.shard.adapters.reader import NOT_HERE, AdapterReader
from lorikeet.shard.grpc.inbox import AdapterRead, Inbox
from lorikeet.shard.scheduler.adapter_slots import Content


def read(path: Path) -> Content:
    said = path.read_text()
    if said == "refused":
        raise ValueError("it is refused")
    if said == "broken":
        raise KeyError("secret")
    raise AssertionError(said)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, NOT_HERE), ("refused", "it is refused"), ("broken", "the adapter could not be read: KeyError")],
)
def test_an_adapter_that_cannot_be_had_fails_with_its_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "d.safetensors").write_text(text)
    inbox = Inbox()
    AdapterReader(tmp_path, read, inbox).ask("d")
    inbox.wait(20)
    assert inbox.drain() == [AdapterRead("d", None, reason)]

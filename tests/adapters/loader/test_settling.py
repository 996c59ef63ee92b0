"""A local adapter that cannot be read while its files are written is not refused for good."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorikeet.adapters.errors import AdapterChanged
from lorikeet.adapters.loader.jobs import EMPTY_CHECKS, SETTLE_S, Jobs
from lorikeet.adapters.refs import Ref, SourceKind
from lorikeet.adapters.sources.listed import LocalSource

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize(("content", "seconds"), [(b"{", SETTLE_S / 5), (b"", SETTLE_S * EMPTY_CHECKS / 2)])
async def test_files_that_change_a_moment_later_are_read_again(
    tmp_path: Path, content: bytes, seconds: float, is_written: bool
) -> None:
    """An empty file has longer: whatever has emptied it is about to write it."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_bytes(content)
    local = LocalSource([tmp_path], 1000)
    pin = (await local.resolve(Ref(SourceKind.LOCAL, "a"), None)).pin
    jobs: Any = SimpleNamespace(_sources={SourceKind.LOCAL: local})
    checking = asyncio.create_task(Jobs._check_unchanged(jobs, pin))
    await asyncio.sleep(seconds)
    if is_written:
        (folder / "adapter_config.json").write_bytes(b"{}")
        with pytest.raises(AdapterChanged, match="has changed"):
            await checking
    else:
        await checking

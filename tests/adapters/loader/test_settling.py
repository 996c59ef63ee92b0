"""A local adapter that cannot be read while its files are written is not refused for good."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorikeet.adapters.errors import AdapterChanged
from lorikeet.adapters.loader.jobs import EMPTY_GRACE_S, SETTLE_S, Jobs
from lorikeet.adapters.refs import Pin, Ref, SourceKind
from lorikeet.adapters.sources.listed import LocalSource

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("is_written", [True, False])
async def test_files_that_change_a_moment_later_are_read_again(tmp_path: Path, is_written: bool) -> None:
    jobs, pin = await adapter(tmp_path, b"{")
    checking = asyncio.create_task(Jobs._check_unchanged(jobs, pin))
    await asyncio.sleep(SETTLE_S / 5)
    if is_written:
        (tmp_path / "a" / "adapter_config.json").write_bytes(b"{}")
        with pytest.raises(AdapterChanged, match="has changed"):
            await checking
    else:
        await checking


@pytest.mark.parametrize("age_s", [0.0, EMPTY_GRACE_S + 1.0])
async def test_an_empty_file_that_was_just_written_is_retried(tmp_path: Path, age_s: float) -> None:
    jobs, pin = await adapter(tmp_path, b"", age_s)
    if age_s < EMPTY_GRACE_S:
        with pytest.raises(AdapterChanged, match="json of a is empty"):
            await Jobs._check_unchanged(jobs, pin)
    else:
        await Jobs._check_unchanged(jobs, pin)


async def adapter(root: Path, content: bytes, age_s: float = 0.0) -> tuple[Any, Pin]:
    """A local adapter with such a configuration, written so long ago."""
    folder = root / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_bytes(content)
    os.utime(folder / "adapter_config.json", (0.0, time.time() - age_s))
    local = LocalSource([root], 1000)
    pin = (await local.resolve(Ref(SourceKind.LOCAL, "a"), None)).pin
    return SimpleNamespace(_sources={SourceKind.LOCAL: local}), pin

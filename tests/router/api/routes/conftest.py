"""Fixtures of the HTTP tests: one served router per module, idle again after each test."""

from collections.abc import AsyncIterator

import pytest

from tests.router.serving import Serving, serving


@pytest.fixture(scope="module")
async def shared(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("serving")) as started:
        yield started


@pytest.fixture
async def server(shared: Serving) -> AsyncIterator[Serving]:
    """No request may still run after a test."""
    shared.shard.submits.clear()
    shared.shard.abort_ids.clear()
    shared.shard.finished_ids.clear()
    yield shared
    await shared.idle()

"""One event loop for all tests of the router.

gRPC's asyncio API has one queue of events per process; events of a closed loop would block those of the next one.
"""

from collections.abc import AsyncIterator

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps the loop open until the last test is over."""
    yield

"""The browser and axe-core of the page's other tests, and a server whose model has a name."""

from collections.abc import Iterator

import pytest

from tests.e2e.page.browsing import Server
from tests.e2e.page.conftest import axe, browser
from tests.page.states import MODEL

__all__ = ["axe", "browser"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    with Server(folder, adapters=True, served_model_names=(MODEL,)) as started:
        yield started

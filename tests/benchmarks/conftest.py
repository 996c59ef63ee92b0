"""A tiny base with a folder for its adapters, made once."""

import pytest

from benchmarks.load import adapted


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> adapted.AdaptedBase:
    return adapted.small(tmp_path_factory.mktemp("adapted"))

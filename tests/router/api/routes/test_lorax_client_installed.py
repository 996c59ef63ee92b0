"""The tests of LoRAX's own client with the client installed, so that none of them is skipped. Needs a package index."""

import pytest

from tests.pytest_outcomes import outcomes
from tests.router.api import lorax_client


@pytest.mark.long
def test_no_test_of_the_client_is_skipped_or_fails() -> None:
    lorax_client.install()
    counts = outcomes("tests/router/api/routes/test_lorax_client.py", LORIKEET_REQUIRE_LORAX_CLIENT="1")
    assert {name: why for name, why in counts.items() if why} == {}
    assert counts

"""The table of number formats in docs/quantization.md is that of the stored results."""

from tests.real import results


def test_the_table_is_that_of_the_stored_results() -> None:
    text = results.DOCUMENT.read_text()
    assert results.rendered(text) == text
    assert results.table().count("\n") > 10

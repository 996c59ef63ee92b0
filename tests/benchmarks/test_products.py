"""The benchmark of products on CPU: it checks each product, and prints what it measured."""

import json

import pytest

from benchmarks.kernels import products
from lorikeet.shard.model.kernels import cpu, integer

pytestmark = pytest.mark.skipif(not (cpu.available() and integer.available()), reason="needs a C compiler")


def test_a_small_run_prints_every_product(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main(["--quick"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    (times,) = json.loads(last)["milliseconds"].values()
    assert {rows: set(row) for rows, row in times.items()} == {str(rows): set(products.KINDS) for rows in products.ROWS}


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(products.TOLERANCE, "int4", 1e-6)
    with pytest.raises(RuntimeError, match="int4, 1 rows: errors are"):
        products.compare((64, 128), 1, 0)

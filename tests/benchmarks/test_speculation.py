"""The tables of speculative decoding, on cases made up."""

from typing import Any

import pytest

from benchmarks.evidence.figure import Case
from benchmarks.speculation import __main__ as tables
from benchmarks.speculation import counts as figures
from benchmarks.speculation import published
from tests.oracles.replay import Counts


def raw(tau: float, seconds: float = 1.0, **values: Any) -> dict[str, Any]:
    steps = 1000
    counts = figures.as_raw(Counts(10 + tau * steps, 10 + steps, 4000, 3000, 10, 25.0))
    return {**counts, "seconds": seconds, "repeated": 0.1, "oracle": counts, "miscounted": 0, "ties": 0, **values}


def test_figures_of_a_case() -> None:
    result = raw(3.0, lorax=figures.as_raw(Counts(3010, 1510, 4500, 1500, 10)))
    assert figures.tau(result) == 3.0
    assert figures.over_lorax(result) == 1.5
    assert figures.rows_over_lorax(result) == pytest.approx(4000 / 4500)
    assert figures.distance(result) == 0.0
    assert figures.distance({**result, "forwards": 1020}) == 2.0
    assert figures.num_miscounted({**result, "miscounted": 3}) == 3


def test_lmflow_s_own_table_is_fitted_by_its_own_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case("width 0", raw(1.0, 1.0))]
    for width, tau in published.LMFLOW_FORWARDS.items():
        tokens = 10 + 1000 * tau
        cases.append(Case(f"width {width}", raw(tau, tokens / 1010 / published.LMFLOW_TIME[width])))
    tables.gamma(cases)
    printed = capsys.readouterr().out
    assert "| 4 | 3.060 | 3.060 | 4.630 | 4.630 | 4.630 | 0 | 0 |" in printed
    assert "α 0.959 (LMFlow's 0.959)" in printed
    assert "c 0.122 (LMFlow's 0.122)" in printed


def test_every_table_shows_its_cases(capsys: pytest.CaptureFixture[str]) -> None:
    phases = {"draft_seconds": 0.2, "verify_seconds": 0.7, "accept_seconds": 0.1}
    one = raw(3.0, lorax=figures.as_raw(Counts(3010, 1510, 4500, 1500, 10)), **phases)
    tables.rows([Case(name, one) for name in ("draft alone", "target alone", "width 4")])
    tables.chat([Case("off", one), Case("width 4", one)])
    for show in (tables.sampled, tables.lookup, tables.medusa):
        show([Case("some corpus 3", one)])
    printed = capsys.readouterr().out
    assert printed.count("| some corpus 3 | 3.000 | 3.000 |") == 3
    assert "| ours | 0.750 | 1.000 | 0.200 | 0.700 | 0.100 | 3010.000 |" in printed
    assert "| 4 | 3010.000 | 1.000 | 1.295 | 3.000 |" in printed

"""The table of figures that goes into README."""

import pytest

from benchmarks.bars import BARS
from benchmarks.history import BEGIN, END, without_figures
from benchmarks.readme import generated, number, table

TOLD = {
    "bar": BARS[0].name,
    "wanted": 0.72,
    "at_least": True,
    "unit": "",
    "measured": 0.75123,
    "spread": [0.741, 0.76],
    "verdict": "holds",
    "cases": [],
}


def test_the_newest_entry_is_shown_and_misses_are_told() -> None:
    assert f"| {BARS[0].name} | 0.751 | 0.741 – 0.76 | ≥ 0.72 | holds |" in table([TOLD], family=False)
    missed = {**TOLD, "measured": 0.5, "spread": [0.4, 0.6], "verdict": "missed"}
    assert "| 0.5 | 0.4 – 0.6 | ≥ 0.72 | missed |" in table([TOLD, missed], family=False)
    assert "0.751" not in table([TOLD, missed], family=False)


def test_the_family_s_figures_stand_by_themselves() -> None:
    name = next(bar.name for bar in BARS if bar.part.startswith("demo"))
    told = {**TOLD, "bar": name}
    assert name in table([told], family=True)
    assert name not in table([told], family=False)
    assert TOLD["bar"] not in table([TOLD], family=True)


def test_only_the_part_between_the_markers_changes() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = generated(text, [TOLD], family=False)
    assert new.startswith(f"before\n{BEGIN}\n| what")
    assert new.endswith(f"{END}\nafter\n")
    assert generated(new, [TOLD], family=False) == new
    assert without_figures(new) == without_figures(text)


def test_markers_are_needed() -> None:
    with pytest.raises(ValueError, match="README needs"):
        generated("no markers", [TOLD], family=False)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.72, "0.72"), (43211.7, "43212"), (2.8e-8, "2.8e-08"), (0.0, "0"), (None, "–"), (12.0, "12")]
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert number(value) == shown

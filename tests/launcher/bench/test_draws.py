"""What is drawn has the distribution that was asked for, and the same seed draws the same."""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean, median, pstdev

import numpy as np
import pytest

from lorikeet.launcher.bench import workload
from lorikeet.launcher.bench.workload import LengthDistribution

NAMES = tuple(f"a{index}" for index in range(64))


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(
    ("text", "low", "high", "middle"),
    [
        ("128", 128, 128, 128),
        ("uniform:64-256", 64, 256, 160),
        ("normal:100,10", 40, 160, 100),
        ("lognormal:100,2", 1, 10_000, 100),
        ("exponential:100", 1, 2000, 69),
    ],
)
def test_lengths(text: str, low: int, high: int, middle: int) -> None:
    drawn = LengthDistribution.read(text).draw(generator(), 4000)
    assert low <= min(drawn) and max(drawn) <= high
    assert abs(median(drawn) - middle) <= 0.05 * middle


@pytest.mark.parametrize("text", ["", "x", "uniform:9", "uniform:9-1", "normal:a,b", "pareto:1", "normal:1,2,3"])
def test_other_lengths_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        LengthDistribution.read(text)


def test_zipf_s_frequencies() -> None:
    count = Counter(workload.adapters("zipf", NAMES, 50_000, generator(), 1.0))
    total = sum(1 / rank for rank in range(1, 65))
    for rank, name in enumerate(NAMES[:8], 1):
        assert count[name] == pytest.approx(50_000 / rank / total, rel=0.1)


def test_uniform_distinct_and_no_adapters() -> None:
    count = Counter(workload.adapters("uniform", NAMES, 64_000, generator(), 1.0))
    assert all(count[name] == pytest.approx(1000, rel=0.2) for name in NAMES)
    assert workload.adapters("distinct", NAMES[:3], 7, generator(), 1.0) == ["a0", "a1", "a2", "a0", "a1", "a2", "a0"]
    assert workload.adapters("zipf", (), 2, generator(), 1.0) == [None, None]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    starts = workload.arrivals(8.0, burstiness, 40_000, generator())
    gaps = np.diff([0.0, *starts])
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert workload.arrivals(8.0, float("inf"), 3, generator()) == pytest.approx([0.125, 0.25, 0.375])
    assert workload.arrivals(float("inf"), burstiness, 3, generator()) == [0.0, 0.0, 0.0]


def shape(**fields: object) -> workload.WorkloadShape:
    values = {
        "num_requests": 20,
        "input_length": LengthDistribution.read("uniform:5-60"),
        "output_length": LengthDistribution.read("9"),
    }
    return workload.WorkloadShape(**(values | fields))  # type: ignore[arg-type]


def test_prompts_have_exactly_the_tokens_that_were_drawn() -> None:
    def count(text: str) -> int:
        """Words of more than four letters are two tokens."""
        return sum(1 + (len(word) > 4) for word in text.split())

    drawn = LengthDistribution.read("uniform:5-60").draw(np.random.default_rng(3), 20)
    plan = workload.drawn(shape(seed=3), count)
    assert [count(request.prompt) for request in plan] == drawn
    assert [len(request.prompt.split()) for request in workload.drawn(shape(seed=3), None)] == drawn
    assert workload.drawn(shape(seed=3), count) == plan != workload.drawn(shape(seed=4), count)


def test_prompts_share_their_beginnings() -> None:
    plan = workload.drawn(shape(prefix_length=12, num_prefixes=2, num_requests=40), None)
    beginnings = Counter(" ".join(request.prompt.split()[:12]) for request in plan)
    assert len(beginnings) == 2 and min(beginnings.values()) > 8
    assert len({request.prompt for request in plan}) == 40


def read(file: Path, **fields: object) -> list[workload.Planned]:
    drawn_shape = shape(**fields)
    return workload.read(workload.rows(file, drawn_shape.num_requests), drawn_shape)


def test_a_dataset_gives_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"prompt": "one", "output_tokens": 3, "adapter": "b", "at": 0.5}, {"prompt": "two"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read(file)
    assert first == workload.Planned("one", 3, "b", 0.5)
    assert second == workload.Planned("two", 9, None, 0.0)
    file.write_text(json.dumps([{"conversations": [{"value": "hello"}, {"value": "you"}]}]))
    [only] = read(file, adapters=("x",))
    assert (only.prompt, only.adapter) == ("hello", "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "neither"), ("", "no requests"), ('{"a": 1}', "no `prompt`"), ('{"prompt": "a", "at": "x"}', "`at` of")],
)
def test_other_datasets_are_rejected(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=reason):
        workload.rows(tmp_path / "file", 9)

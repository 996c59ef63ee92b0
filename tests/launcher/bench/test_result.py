"""Numbers of results against values computed by hand; the printed block; streams cut anywhere."""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorikeet.launcher.bench import presentation, result
from lorikeet.launcher.bench.load import APIS, LoadResult, Sample, Seen, events
from lorikeet.launcher.bench.presentation import compared
from lorikeet.launcher.bench.workload import Planned
from lorikeet.launcher.cli.metrics_page import Page


def sample(start: float, ttft: float, *gaps: float, adapter: str | None = None, **fields: Any) -> Sample:
    planned = Planned("p", len(gaps) + 1, adapter)
    answer = Sample(planned, start, 0.0, ttft, list(gaps), ttft + sum(gaps), 10, len(gaps) + 1)
    for name, value in fields.items():
        setattr(answer, name, value)
    return answer


SAMPLES = [
    sample(0.0, 0.1, 0.02, 0.04, adapter="a", tier="slot", sources=Counter(target=1, lookup=2), num_steps=2),
    sample(0.1, 0.3, 0.02, adapter="b", tier="disk", sources=Counter(target=2), num_steps=2),
    sample(0.2, 0.2, adapter="a", tier="slot", sources=Counter(target=1), num_steps=1),
    Sample(Planned("p", 4, "c"), 0.3, error="status 429: full"),
]
SETTINGS = {"date": "20261125-120000", "label": "<l>", "model_id": "m", "max_concurrency": 4, "request_rate": 2.0}
SETTINGS |= {"backend": "lorax"}


def made() -> dict[str, Any]:
    return SETTINGS | result.measured(LoadResult(SAMPLES, 2.0, 0.5), [99], {"ttft": 250, "tpot": 30})


def test_numbers() -> None:
    expected = {
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 6,
        "request_throughput": 1.5,
        "request_goodput": 1.0,
        "output_throughput": 3.0,
        "total_token_throughput": 18.0,
        "max_concurrent_requests": 2,
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "p99_ttft_ms": 298.0,
        "median_itl_ms": 20.0,
        "median_tpot_ms": 25.0,
        "mean_e2el_ms": pytest.approx((160 + 320 + 200) / 3),
    }
    numbers = made()
    assert {key: numbers[key] if key == "mean_e2el_ms" else pytest.approx(numbers[key]) for key in expected} == expected


def test_adapters_and_sources() -> None:
    ours = made()["lorikeet"]
    assert {tier: values["requests"] for tier, values in ours["tiers"].items()} == {"disk": 1, "slot": 2}
    assert ours["tiers"]["slot"]["median_ttft_ms"] == pytest.approx(150)
    assert list(ours["adapters"]) == ["a", "b"]
    speeds = 4 / 0.36, 2 / 0.32
    assert ours["fairness"]["jain_index_of_speed"] == pytest.approx(sum(speeds) ** 2 / 2 / sum(s * s for s in speeds))
    assert ours["fairness"]["worst_over_median_ttft"] == pytest.approx(0.3 / 0.225)
    assert ours["sources"]["tokens_per_step"] == {"target": 0.8, "lookup": 0.4}
    assert ours["client_cpu_share"] == 0.25


def test_the_block_has_vllm_s_lines() -> None:
    lines = presentation.block(made(), ["ttft", "tpot", "itl"], [99]).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     3         "
    assert "Request goodput (req/s):                 1.00      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "P99 TTFT (ms):                           298.00    " in lines
    assert lines[-1] == "=" * 50


def test_the_report_is_one_file_without_links() -> None:
    text = presentation.html(made(), "the block")
    assert text.count("<svg") >= 6
    assert "&lt;l&gt;" in text and "<l>" not in text
    assert not re.search(r"(?:src|href|url)\s*[=(]|(?<!xmlns=\")https?://|@import|<script", text)
    rows = presentation.table(made()).splitlines()
    assert rows[0].startswith("request,adapter,tier,start_s")
    assert len(rows) == 5 and rows[4].endswith("status 429: full")


def test_a_comparison_says_what_is_shown() -> None:
    slow = [sample(0.0, 0.1 + 0.001 * index, 0.02, 0.021) for index in range(50)]
    fast = [sample(0.0, 0.05 + 0.001 * index, 0.01, 0.011) for index in range(50)]
    first, second = (result.measured(LoadResult(samples, 2.0, 0.1), [99], {}) for samples in (slow, fast))
    lines = compared(first, second).splitlines()
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert "better" in next(line for line in lines if line.startswith(f"Median {name}"))
    assert "better" not in compared(first, first)


def test_gaps_of_a_request_are_drawn_together() -> None:
    """Four of seven requests are slow throughout: no number of gaps makes the median of so few requests sure."""
    mixed = [sample(0.0, 0.1, *[0.01 if index % 2 else 0.02] * 200) for index in range(7)]
    measured = result.measured(LoadResult(mixed, 2.0, 0.1), [99], {})
    itl = next(line for line in compared(measured, measured).splitlines() if line.startswith("Median ITL"))
    assert "0.500 – 2.000, no difference shown" in itl


def test_a_median_of_zero_has_no_ratio() -> None:
    """Tokens that come together have no time between them."""
    together = [sample(0.0, 0.1, 0.0, 0.0, 0.0) for _ in range(7)]
    measured = result.measured(LoadResult(together, 2.0, 0.1), [99], {})
    itl = next(line for line in compared(measured, measured).splitlines() if line.startswith("Median ITL"))
    assert itl.split()[3:] == ["0.00", "0.00", "nan"]


def test_results_without_values_per_request_have_no_interval() -> None:
    first = {key: value for key, value in made().items() if key not in result.ARRAYS}
    assert "difference" not in compared(first, made())


def page(text: str) -> result.SpeculationCounts:
    return result.SpeculationCounts.read(Page.read(text, 0.0))


@pytest.mark.parametrize(
    "names",
    [
        ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
         "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        ("lorikeet_speculation_steps_total", "lorikeet_drafted_tokens_total", "lorikeet_accepted_tokens_total",
         "lorikeet_speculation_accepted_tokens_per_position_total"),
    ],
)  # fmt: skip
def test_acceptance_by_position(names: tuple[str, ...]) -> None:
    drafts, drafted, accepted, position = names
    start = f'{drafts} 10\n{drafted} 30\n{accepted} 12\n{position}{{position="0"}} 8\n{position}{{position="1"}} 4\n'
    after = (
        f"{drafts} 30\n{drafted} 90\n{accepted} 40\n"
        f'{position}{{method="a",position="0"}} 20\n{position}{{method="b",position="0"}} 3\n'
        f'{position}{{position="1"}} 12\n{position}{{position="2"}} 5\n'
    )
    rates = result.rates(page(start), page(after))
    assert rates["spec_decode_per_position_acceptance_rates"] == [0.75, 0.4, 0.25]
    lines = presentation.block(made() | rates, [], [99]).splitlines()
    index = lines.index("Per-position acceptance (%):")
    assert lines[index + 1] == "  Position 0:                            75.00     "
    assert lines[index - 1] == "Accepted tokens:                         28        "
    assert result.rates(page(start), page(start)) == {}


def test_objectives() -> None:
    assert result.goals(["ttft:200", "e2el:1.5"]) == {"ttft": 200, "e2el": 1.5}
    for word in ("ttft", "itl:3", "tpot:-1", "tpot:x"):
        with pytest.raises(ValueError, match="is not an objective"):
            result.goals([word])


STREAM = b'data: {"a": 1}\r\n\r\n: comment\n\ndata:{"b":2}\n\nevent: x\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    edges = sorted({0, *cuts, len(STREAM)})
    pieces = [(float(low), STREAM[low:high]) for low, high in pairwise(edges)]
    assert [data for _, data in events(pieces)] == [b'{"a": 1}', b'{"b":2}', b"[DONE]"]


@pytest.mark.parametrize(
    ("api", "stream", "times", "num_output"),
    [
        ("openai", [b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"","finish_reason":"length"}]}',
                    b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}', b"[DONE]"], 1, 1),
        ("openai-chat", [b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
                         b'{"choices":[{"delta":{"content":"a"}}]}', b'{"choices":[{"delta":{"content":"b"}}]}',
                         b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}', b"[DONE]"], 2, 2),
        ("lorax", [b'{"token":{"text":"a","skipped":false,"source":"target"}}',
                   b'{"token":{"text":"b","skipped":true,"source":"lookup"}}',
                   b'{"token":{"text":"c","skipped":false},"generated_text":"abc","details":'
                   b'{"prompt_tokens":3,"generated_tokens":3}}'], 2, 3),
    ],
)  # fmt: skip
def test_streams_of_each_api(api: str, stream: list[bytes], times: int, num_output: int) -> None:
    seen, reader = Seen(), APIS[api]("m", {}, True)
    for second, event in enumerate(stream):
        reader.read(event, float(second), seen)
    assert seen.is_complete and not seen.error
    assert (len(seen.token_times), seen.num_output, seen.num_prompt) == (times, num_output, 3)
    reader.read(b'{"error":{"message":"no room"}}', 9.0, seen)
    assert seen.error == "no room"

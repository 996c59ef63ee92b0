"""The screen of lorikeet-top for pages of metrics, and against a router."""

import asyncio
import io
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lorikeet.launcher.cli.metrics_page import Interval, Page
from lorikeet.launcher.cli.top import main, screen
from lorikeet.router.metrics.groups import Histogram
from tests.router.conftest import anyio_backend, one_loop  # noqa: F401
from tests.router.scripted_shard import Script
from tests.router.serving import serving

BEFORE = """# TYPE lorax_request_count counter
lorax_request_count 10
# TYPE lorikeet_generated_tokens_total counter
lorikeet_generated_tokens_total 100
"""
AFTER = """# TYPE lorax_request_count counter
lorax_request_count 30
# TYPE lorikeet_generated_tokens_total counter
lorikeet_generated_tokens_total 700
# TYPE lorikeet_kv_pages gauge
lorikeet_kv_pages 200
# TYPE lorikeet_kv_pages_used gauge
lorikeet_kv_pages_used 50
# TYPE lorax_request_failure counter
lorax_request_failure{err="overloaded"} 4
# TYPE lorikeet_adapter_generated_tokens_total counter
lorikeet_adapter_generated_tokens_total{adapter="fox"} 80
# TYPE lorikeet_speculation_drafted_tokens_total counter
lorikeet_speculation_drafted_tokens_total{method="lookup",adapter="fox"} 40
# TYPE lorikeet_speculation_accepted_tokens_total counter
lorikeet_speculation_accepted_tokens_total{method="lookup",adapter="fox"} 30
# TYPE lorikeet_speculation_steps_total counter
lorikeet_speculation_steps_total{method="lookup",adapter="fox"} 20
"""


STEP = [{"tokens": 12, "drafts": 0, "prefill": True}, {"tokens": 1, "drafts": 3, "prefill": False}]
READY = {"index": 0, "connected": True, "ready": True, "running": 2, "waiting": 1, "resident_adapters": 5}
MEMORY = {"pages": 8, "used_pages": 4, "step_ms": 7, "step": STEP, "adapter_slots": 16}
LOST = {"index": 1, "connected": False, "ready": False, "running": 0, "resident_adapters": 0, "adapter_slots": 0}
LIVE = {
    "requests": {"running": 2, "waiting": 1, "preempted": 6},
    "tiers": {"device": 5, "host": 7, "disk": 31, "into_slot": 2, "from_source": ["far", "farther"]},
    "adapters": [
        {"name": "fox", "running": 1, "waiting": 0, "preempted": 0},
        {"name": "owl", "running": 1, "waiting": 0, "preempted": 3},
        {"name": None, "running": 0, "waiting": 1, "preempted": 1},
        {"name": None, "num_others": 9, "running": 0, "waiting": 0, "preempted": 2},
    ],
    "shards": [READY | MEMORY, LOST],
    "draining": False,
}


def drawn(first_page: str, last_page: str, live: dict[str, Any] | None = None, width: int = 110) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(Interval(Page.read(first_page, 5.0), Page.read(last_page, 7.0)), "title", live))
    return console.export_text()


def test_rates_shares_and_tables() -> None:
    text = drawn(BEFORE, AFTER)
    rows = {" ".join(line.split()) for line in text.replace("│", " ").splitlines()}
    assert any("requests/s 10.0" in row for row in rows)
    assert any("output tokens/s 300" in row for row in rows)
    assert "25%" in text and "overloaded 2.00/s" in text
    assert "lookup 20 15 75% 2.50" in rows
    assert "fox 0 0 0.0 40 0" in rows
    assert "no shard accepts requests" in text


def test_shards_and_their_steps() -> None:
    rows = [" ".join(line.replace("│", " ").split()) for line in drawn(BEFORE, AFTER, LIVE).splitlines()]
    assert any(row.startswith("0 ready 2 1 5 of 16") and row.endswith("50% 7 P12 ·+3") for row in rows)
    assert any(row.startswith("1 lost 0 – 0 –") for row in rows)


def test_labels_and_steps_fit_in_eighty_columns() -> None:
    text = drawn(BEFORE, AFTER, LIVE, width=80)
    assert "│ in host memory, on disk" in text and "│ lost shards, retried " in text
    assert "P12 ·+3" in text


def test_what_only_the_live_view_knows() -> None:
    text = drawn(BEFORE, AFTER, LIVE)
    rows = " ".join(text.replace("│", " ").split())
    assert "in host memory, on disk 7, 31" in rows and "moving into a slot 2" in rows
    assert "being loaded: far, farther" in rows
    assert "preempted: owl 3, base model 1, 9 others 2" in rows
    assert "shuts down" not in text and "shuts down" in drawn(BEFORE, AFTER, LIVE | {"draining": True})


def test_a_counter_that_has_fallen_was_reset() -> None:
    interval = Interval(Page.read(AFTER, 0.0), Page.read(BEFORE, 1.0))
    assert interval.rate("lorikeet_generated_tokens_total") == 100
    assert interval.rate("unknown") == 0 and interval.quantile(0.5, "unknown") is None


@given(st.lists(st.floats(0.001, 99), min_size=1, max_size=60), st.sampled_from([0.5, 0.95]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    bounds = [0.01, 0.1, 1.0, 10.0, 100.0]
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    lines = "".join(f'h_bucket{{le="{bound}"}} {count}\n' for bound, count in histogram.buckets())
    page = Page.read(f"# TYPE h histogram\n{lines}h_sum 1\nh_count {len(values)}\n", 1.0)
    quantile = Interval(Page(0.0, {}), page).quantile(share, "h")
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    top = next(bound for bound in bounds if true <= bound)
    assert quantile is not None and max([0.0, *(bound for bound in bounds if bound < top)]) <= quantile <= top


@pytest.mark.anyio
async def test_it_shows_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path) as server:
        server.shard.answer = lambda submit: Script([5] * submit.max_new_tokens)
        watching = asyncio.create_task(asyncio.to_thread(main, ["--url", server.url, "--once", "--interval", "0.5"]))
        while not watching.done():
            body = {"inputs": "secret", "parameters": {"max_new_tokens": 20}}
            assert (await server.client.post("/generate", json=body)).status_code == 200
        assert await watching == 0
    text = capsys.readouterr().out
    rest = text[text.index("test/model at") :]
    assert "output tokens/s" in rest and "secret" not in rest
    assert "0      ready" in rest


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--interval", "0"], "above 0"), (["--url", "ftp://a"], "not the URL"), (["--url", "127.0.0.1:9"], "connect")],
)
def test_what_is_wrong_is_one_sentence(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("lorikeet-top: ")

"""Whole runs against a router with a scripted shard."""

import asyncio
import json
from pathlib import Path

import pytest

from lorikeet.launcher.bench.main import main
from tests.router.conftest import anyio_backend, one_loop  # noqa: F401
from tests.router.scripted_shard import Script
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

VLLM_KEYS = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
output_throughput total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times
generated_texts errors max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms
p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms
p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
spec_decode_acceptance_rate spec_decode_acceptance_length spec_decode_num_drafts spec_decode_draft_tokens
spec_decode_accepted_tokens spec_decode_per_position_acceptance_rates
"""


async def bench(server: Serving, *arguments: str) -> int:
    words = ["run", "--url", server.url, "--no-progress", "--num-prompts", "6", "--output-len", "5", *arguments]
    return await asyncio.to_thread(main, words)


@pytest.mark.parametrize("api", ["openai", "openai-chat", "lorax"])
async def test_every_api_counts_the_same(tmp_path: Path, api: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, page, table = (tmp_path / f"result.{kind}" for kind in ("json", "html", "csv"))
    async with serving(tmp_path / "server") as server:
        server.shard.answer = lambda submit: Script([5] * submit.max_new_tokens, per_step=2)
        outputs = ("--result", str(file), "--html", str(page), "--csv", str(table))
        assert await bench(server, "--api", api, "--max-concurrency", "2", "--num-warmups", "2", *outputs) == 0
        assert len(server.shard.submits) == 8
    saved = json.loads(file.read_text())
    assert set(VLLM_KEYS.split()) <= set(saved)
    assert (saved["completed"], saved["failed"], saved["total_output_tokens"]) == (6, 0, 30)
    assert saved["max_concurrent_requests"] == 2
    assert saved["total_input_tokens"] == sum(saved["input_lens"]) > 0
    output = capsys.readouterr()
    assert (
        "Successful requests:                     6" in output.out
        and output.err == "lorikeet-bench: sends 6 requests\n"
    )
    assert ("Measured with --api lorax only." in output.out) == (api != "lorax")
    assert len(table.read_text().splitlines()) == 7 and page.read_text().startswith("<!doctype html>")
    if api == "lorax":
        assert saved["lorikeet"]["sources"]["steps"] == 18
    assert saved["spec_decode_draft_tokens"] == 12
    assert saved["spec_decode_per_position_acceptance_rates"] == [1.0]
    assert await asyncio.to_thread(main, ["compare", str(file), str(file)]) == 0
    assert "Median TTFT" in capsys.readouterr().out


async def test_adapters_and_their_tiers(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    (tmp_path / "server").mkdir()
    async with serving(tmp_path / "server", adapters=True) as server:
        names = ",".join(server.adapter(f"fox{index}") for index in range(3))
        adapters = ("--adapters", names, "--adapter-distribution", "distinct", "--api", "lorax", "--num-warmups", "0")
        assert await bench(server, *adapters, "--max-concurrency", "1", "--result", str(file)) == 0
    ours = json.loads(file.read_text())["lorikeet"]
    assert ours["request_adapters"] == ["fox0", "fox1", "fox2"] * 2
    assert ours["fairness"]["adapters"] == 3
    assert set(ours["request_tiers"]) <= {"slot", "disk", "source"} and len(set(ours["request_tiers"])) == 2


async def test_an_open_loop_sends_when_requests_arrive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    async with serving(tmp_path / "server") as server:
        server.shard.answer = lambda submit: Script([5] * submit.max_new_tokens, step_seconds=0.05)
        rate = ("--request-rate", "20", "--burstiness", "inf", "--goodput", "e2el:60000", "--max-concurrency", "1")
        latencies = ("--percentile-metrics", "client_queue_time,e2el_including_client_queue")
        assert await bench(server, *rate, *latencies, "--result", str(file)) == 0
    saved = json.loads(file.read_text())
    assert saved["median_e2el_including_client_queue_ms"] > saved["median_e2el_ms"]
    assert saved["p99_client_queue_time_ms"] > 0
    assert "--------Queue-inclusive End-to-end Latency--------" in capsys.readouterr().out
    starts = saved["start_times"]
    assert all(start >= 0.05 * (index + 1) - 0.002 for index, start in enumerate(starts))  # timers count milliseconds
    assert saved["request_goodput"] == saved["request_throughput"]


async def test_several_processes_send_the_whole_plan(tmp_path: Path) -> None:
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    async with serving(tmp_path / "server") as server:
        server.shard.answer = lambda submit: Script([5] * submit.max_new_tokens, step_seconds=0.01)
        for file, count in ((one, "1"), (several, "3")):
            assert await bench(server, "--max-concurrency", "4", "--processes", count, "--result", str(file)) == 0
    found, expected = (json.loads(file.read_text()) for file in (several, one))
    assert found["client_processes"] == 3 and found["max_concurrent_requests"] <= 4
    for key in ("completed", "failed", "total_output_tokens", "input_lens", "output_lens", "errors"):
        assert found[key] == expected[key]


async def test_failures_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path / "server") as server:
        server.shard.answer = lambda submit: Script([5, 5], error="broken")
        assert await bench(server, "--num-warmups", "0") == 1
        assert "6 requests failed" in capsys.readouterr().err
        assert await bench(server) == 1
        assert "a request before the measurement failed" in capsys.readouterr().err
        assert await bench(server, "--model", "unknown", "--num-warmups", "0") == 1
        assert "status 404" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--num-prompts", "0"],
        ["--processes", "0"],
        ["--processes", "101"],
        ["--processes", "3", "--max-concurrency", "2"],
        ["--request-rate", "0"],
        ["--goodput", "itl:3"],
        ["--percentile-metrics", "ttft,x"],
        ["--metric-percentiles", "x"],
        ["--metric-percentiles", "101"],
        ["--adapters", ","],
        ["--tokenizer", "/nowhere"],
        ["--header", "x"],
        ["--url", "ftp://a"],
        ["--dataset", "/nowhere"],
    ],
)
def test_settings_that_make_no_sense_are_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "127.0.0.1:9", *words]) == 1
    assert capsys.readouterr().err.startswith("lorikeet-bench: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--input-len", "abc"], "'abc' is not a length: write "),
        (["--extra-body", "{"], "'{' is not valid JSON"),
        (["--extra-body", "[]"], "'[]' is not a JSON object"),
    ],
)
def test_values_that_cannot_be_read_are_explained(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", *words])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a result of `lorikeet-bench run --result`"),
        ('{"completed": 3}', "it has no completed or request_throughput"),
        ('{"completed": 3, "request_throughput": 1, "median_ttft_ms": "x"}', "median_ttft_ms is 'x'"),
        ('{"completed": 3, "request_throughput": 1, "errors": [""], "ttfts": []}', "are not lists of one length"),
    ],
)
def test_files_that_are_no_results_are_named(
    tmp_path: Path, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    assert main(["compare", str(file), str(file)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"lorikeet-bench: {file} ") and sentence in message


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "127.0.0.1:9", "--num-prompts", "1"]) == 1
    assert "lorikeet-bench: cannot connect to http://127.0.0.1:9: " in capsys.readouterr().err

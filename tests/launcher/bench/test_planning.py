"""Command lines: what has an effect is planned, and what would have none is rejected with an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorikeet.launcher.bench import result, workload
from lorikeet.launcher.bench.main import main, parser
from lorikeet.launcher.bench.workload import Planned

BARE = [{"prompt": "one"}, {"prompt": "two"}]
NAMED = [{"prompt": "one", "adapter": "a"}, {"prompt": "two"}]
TIMED = [{"prompt": "one", "at": 0, "output_tokens": 3}, {"prompt": "two", "at": 1.5, "output_tokens": 4}]


def dataset(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def plan(*words: str) -> list[Planned]:
    return workload.plan(parser().parse_args(["run", *words]))


@pytest.mark.parametrize(
    "words",
    [
        "--num-prefixes 2",
        "--burstiness 2",
        "--burstiness 2 --request-rate inf",
        "--adapter-distribution zipf",
        "--adapter-distribution trace",
        "--zipf-exponent 2",
        "--zipf-exponent 2 --adapters a,b --adapter-distribution uniform",
        "--save-texts",
        "--label x",
    ],
)
def test_settings_without_effect_are_rejected(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "127.0.0.1:9", *words.split()]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"lorikeet-bench: {words.split()[0]} ") and "cannot connect" not in message


@pytest.mark.parametrize(
    ("rows", "words", "sentence"),
    [
        (BARE, "--input-len 9", "--input-len has no effect with --dataset"),
        (BARE, "--prefix-len 9", "--prefix-len has no effect with --dataset"),
        (BARE, "--prefix-len 9 --num-prefixes 2", "has no effect with --dataset"),
        (BARE, "--tokenizer x", "--tokenizer has no effect with --dataset"),
        (BARE, "--adapter-distribution trace", "names no adapter"),
        (BARE, "--num-prompts 3", "has 2 requests: give --num-prompts 2 or fewer"),
        (NAMED, "--adapters b", "names adapters, and --adapters does as well"),
        (NAMED, "--adapters b --adapter-distribution trace", "--adapters has no effect with"),
        (NAMED, "--adapter-distribution uniform", "--adapter-distribution uniform has no effect"),
        (TIMED, "--request-rate 3", "--request-rate has no effect"),
        (TIMED, "--output-len 3", "--output-len has no effect"),
    ],
)
def test_settings_that_a_dataset_replaces_are_rejected(
    tmp_path: Path, rows: list[dict[str, Any]], words: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan("--dataset", str(dataset(tmp_path, rows)), *words.split())


def test_a_dataset_is_sent_whole_with_its_adapters(tmp_path: Path) -> None:
    named = plan("--dataset", str(dataset(tmp_path, NAMED)))
    assert [request.adapter for request in named] == ["a", None]
    assert workload.summary(named) == "2 requests with 1 adapters"
    assert plan("--dataset", str(dataset(tmp_path, NAMED)), "--adapter-distribution", "trace") == named
    bare = plan("--dataset", str(dataset(tmp_path, BARE)), "--adapters", "x", "--num-prompts", "1")
    assert [request.adapter for request in bare] == ["x"]
    assert [request.at for request in plan("--dataset", str(dataset(tmp_path, TIMED)))] == [0, 1.5]
    assert len(plan("--dataset", str(dataset(tmp_path, BARE * 99)))) == workload.NUM_PROMPTS
    assert workload.summary(plan()) == "100 requests"


def test_settings_with_an_effect_are_accepted() -> None:
    words = (
        "--prefix-len 4 --num-prefixes 2 --input-len 8 --output-len 9 --request-rate 8 --burstiness 2 --num-prompts 6"
    )
    requests = plan(*words.split(), "--adapters", "a,b", "--zipf-exponent", "2")
    assert {(len(request.prompt.split()), request.num_output) for request in requests} == {(12, 9)}
    assert {request.adapter for request in requests} <= {"a", "b"} and requests[-1].at > 0


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("ttft,x", "", "has x: choose from ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue"),
        ("client_queue_time", "", "client_queue_time needs --max-concurrency"),
        ("e2el_including_client_queue", "--max-concurrency 2", "needs --request-rate"),
    ],
)
def test_latencies_that_are_not_measured_are_rejected(name: str, words: str, sentence: str) -> None:
    options = parser().parse_args(["run", *words.split()])
    with pytest.raises(ValueError, match=sentence):
        result.check_latencies(name.split(","), workload.plan(options), options.max_concurrency)

"""The tool in real processes on tiny models. Every error is one sentence with exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.formats import heads as files
from lorikeet.adapters.formats.heads import MedusaShape
from lorikeet.adapters.medusa.cli import main
from tests.adapters.medusa import small

ROOT = Path(__file__).parents[3]
CLI = "lorikeet.adapters.medusa.cli"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, an adapter of it, a smaller base, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    small.base(folder / "base")
    small.lora(folder / "base", folder / "adapter")
    small.base(folder / "other", hidden_size=32)
    (folder / "prompts.txt").write_text("\n".join(small.PROMPTS) + "\n")
    (folder / "empty.txt").write_text("\n \n")
    (folder / "nothing.txt").write_text("")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    environment = kept | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "error::UserWarning:lorikeet.adapters",
            "-m",
            "lorikeet.adapters.medusa.cli",
            *arguments,
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


TRAIN = ("train", "--model-id", "base", "--prompts", "prompts.txt", "--out", "out", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("teach",), "invalid choice: 'teach'"),
        (TRAIN[:5], "required: --out"),
        ((*TRAIN, "--num-heads", "0"), "--num-heads: 0 is not 1 or more"),
        ((*TRAIN, "--num-heads", "many"), "--num-heads: invalid"),
        ((*TRAIN, "--held-out", "1"), "--held-out: 1 is not between 0 and 1"),
        ((*TRAIN, "--lr", "nan"), "--lr: nan is not a number above 0"),
        ((*TRAIN, "--join"), "--join needs --adapter-id"),
        ((*TRAIN, "--dtype", "int8"), "--dtype: invalid choice"),
        ((*TRAIN, "--frobnicate"), "unrecognized arguments: --frobnicate"),
        (("train", "--model-id", "base", "--out", "out"), "give --prompts FILE, or --url SERVER"),
        ((*TRAIN, "--num-own-prompts", "9"), "--num-own-prompts cannot be combined with --prompts"),
        ((*TRAIN, "--prompts", "missing.txt"), "there is no prompt file missing.txt"),
        ((*TRAIN, "--prompts", "nothing.txt"), "the prompt file nothing.txt is empty"),
        ((*TRAIN, "--url", "ftp://box"), "--url: 'ftp://box' is not the URL of a server"),
    ],
)
def test_bad_arguments(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(models)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lorikeet-heads: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


OF_MODELS: list[tuple[tuple[str, ...], str]] = [
    ((*TRAIN, "--model-id", "./nowhere"), "the model ./nowhere does not exist"),
    ((*TRAIN, "--model-id", "other", "--adapter-id", "adapter"), "adapter does not fit the base other"),
    ((*TRAIN, "--device", "abacus"), "the device abacus is not available"),
]


@pytest.mark.parametrize(("arguments", "sentence"), OF_MODELS)
def test_models_that_cannot_be_used_are_one_sentence(
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(models)
    assert main(arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lorikeet-heads: ")]
    assert sentence in line
    assert not (models / "out").exists()


LATE: list[tuple[tuple[str, ...], str]] = [
    ((*TRAIN, "--prompts", "empty.txt"), "the prompt file empty.txt is empty"),
    ((*TRAIN, "--model-id", "owner/nowhere"), "the model owner/nowhere is not a folder and cannot be downloaded"),
    ((*TRAIN, "--adapter-id", "base"), "base is not an adapter"),
    (
        (*TRAIN, "--max-new-tokens", "9", "--url", "http://127.0.0.1:9"),
        "the server http://127.0.0.1:9 cannot be reached",
    ),
    ((*TRAIN, "--max-new-tokens", "128"), "no prompt leaves room"),
    ((*TRAIN, "--device", "cuda:77"), "the device cuda:77 is not available"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "--model-id", "base"), "are required: --out"),
        *(pytest.param(*entry, marks=pytest.mark.long) for entry in LATE),
    ],
)
def test_errors_are_one_sentence_with_exit_code_2(models: Path, arguments: tuple[str, ...], sentence: str) -> None:
    ended = run(models, *arguments)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("lorikeet-heads: ")]
    assert sentence in line
    assert "Traceback" not in ended.stderr
    assert not (models / "out").exists()


def last(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report


@pytest.mark.long
def test_heads_are_trained_joined_and_measured(models: Path, tmp_path: Path) -> None:
    quick = ("--max-new-tokens", "20", "--epochs", "40", "--rows-per-step", "32", "--lr", "0.02", "--held-out", "0.2")
    adapter = ("--adapter-id", "adapter", "--join", "--num-heads", "2")
    first = last(run(models, *TRAIN, *quick, *adapter, "--out", str(tmp_path / "one")))
    assert first["num_texts"] == 1
    assert len(first["top1"]) == 2
    out = tmp_path / "one"
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "medusa_lm_head.safetensors",
    ]
    assert files.read(out, print).shape == MedusaShape(2, 1, 64)
    second = last(run(models, *TRAIN, *quick, *adapter, "--out", str(tmp_path / "two")))
    assert second["heads_sha256"] == first["heads_sha256"]
    assert (out / "medusa_lm_head.safetensors").read_bytes() == (
        tmp_path / "two/medusa_lm_head.safetensors"
    ).read_bytes()

    evaluate = ("eval", "--model-id", "base", "--prompts", "prompts.txt", "--max-new-tokens", "20", "--device", "cpu")
    joined = last(run(models, *evaluate, "--heads", str(out)))
    named = last(run(models, *evaluate, "--heads", str(out), "--adapter-id", "adapter"))
    assert {**joined, "heads": ""} == {**named, "heads": ""}
    assert joined["num_texts"] == len(small.PROMPTS)
    assert joined["tokens_per_step"] > 2, "most of these texts were trained on"


def test_heads_of_another_size_are_rejected_with_the_reason(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(models / "big", small.heads(MedusaShape(2, 1, 96)))
    monkeypatch.chdir(models)
    assert main(["eval", "--model-id", "base", "--heads", "big", "--prompts", "prompts.txt", "--device", "cpu"]) == 2
    reason = "the heads big do not fit the base base: they are made for hidden size 96, the base has 64"
    assert reason in capsys.readouterr().err

"""Models of a command line, and errors about the draft model."""

import json
from pathlib import Path

import pytest

from lorikeet.launcher.__main__ import main
from lorikeet.launcher.config.settings import read
from lorikeet.launcher.exits import Exit
from lorikeet.launcher.models.model import ModelFolder
from lorikeet.launcher.processes import download as models
from tests.e2e.launched import ROOT

BASE, DRAFT = str(ROOT / "demo" / "base"), str(ROOT / "demo" / "draft")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "HOSTNAME", "SPECULATIVE_TOKENS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODEL_ID", "lorikeet/base")


def test_print_config_includes_the_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--draft-model-id", DRAFT]) == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["draft_model"] == {"id": DRAFT, "path": DRAFT, "sha": None}
    assert shown["flags"]["speculative-tokens"] == 4
    assert main(["--print-config"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["draft_model"] is None


def test_both_folders_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--download-only", "--model-id", BASE, "--draft-model-id", DRAFT]) == Exit.OK
    assert capsys.readouterr().out.splitlines() == [BASE, DRAFT]


@pytest.mark.parametrize(
    ("arguments", "exit", "said"),
    [
        (["--draft-model-id", "/nowhere"], Exit.DOWNLOAD_ERROR, "the folder /nowhere does not exist"),
        (["--draft-model-id", "a/b/c"], Exit.DOWNLOAD_ERROR, "the folder a/b/c does not exist (--draft-model-id)"),
        (["--draft-model-id", "a b"], Exit.ARGUMENT_VALIDATION, "--draft-model-id: "),
        (["--draft-model-id", DRAFT, "--draft-tokenizer-id", "/no"], Exit.DOWNLOAD_ERROR, "the folder /no does not"),
        (["--speculative-tokens", "-1"], Exit.ARGUMENT_VALIDATION, "--speculative-tokens must be at least 0, not -1"),
        (["--speculative-tokens", "2.5"], Exit.ARGUMENT_VALIDATION, "--speculative-tokens must be an integer, not"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], exit: Exit, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Without --device, a torch for CUDA on a machine without a driver is a warning, which is a line too.
    assert main(["--print-config", "--device", "cpu", *arguments]) == exit
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith(f"lorikeet-launcher: {said}")


def test_a_different_vocabulary_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"word": 0}}}')
    assert main(["--draft-model-id", str(tmp_path)]) == Exit.ARGUMENT_VALIDATION
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} cannot be a draft model for lorikeet/base: its tokenizer differs: token 0 is 'word'" in line


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ((), 4),
        (("--speculative-tokens", "0"), 0),
        (("--speculative-tokens", "7"), 7),
        (("--speculative-tokens-max", "2"), 2),
    ],
)
def test_four_draft_tokens_are_the_default(arguments: tuple[str, ...], tokens: int) -> None:
    settings = read(arguments, {}, "box")
    assert models.with_tokens(settings, ModelFolder("draft", Path("draft")))["speculative-tokens"] == tokens
    assert models.with_tokens(settings, None)["speculative-tokens"] == settings["speculative-tokens"]

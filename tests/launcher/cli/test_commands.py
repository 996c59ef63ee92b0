"""`lorikeet COMMAND`: which module each command runs, and the error of an unknown one."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lorikeet.launcher.cli.commands import COMMANDS, complete_parser, main
from lorikeet.proto.version import version

ROOT = Path(__file__).parents[3]


def test_each_script_is_a_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.pop("lorikeet") == "lorikeet.launcher.cli.commands:main"
    assert scripts == {command.script: f"{command.module}:main" for command in COMMANDS.values() if command.script}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_passes_its_arguments_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr(importlib.import_module(COMMANDS[name].module), "main", run)
    assert main([name, "--some", "words"]) == 7
    assert seen == [["--some", "words"]]


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"    {name}" in printed and command.summary in printed for name, command in COMMANDS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lorikeet {version()}\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("server", "did you mean lorikeet serve?"),
        ("--versoin", "did you mean lorikeet --version?"),
        ("xyzzy", "(lorikeet --help lists all)"),
    ],
)
def test_an_unknown_command_is_an_error(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err == f"lorikeet: there is no command '{name}'{': ' if 'mean' in said else ' '}{said}\n"


def test_completions_know_the_flags_of_commands() -> None:
    text = complete_parser().format_help()
    assert "serve" in text and "chat" in text


def test_help_imports_no_large_library() -> None:
    """So that it answers at once."""
    code = "import sys; from lorikeet.launcher.cli.commands import main; main(['--help']); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "torch", "pydantic", "yaml", "huggingface_hub"} & set(run.stdout.split())

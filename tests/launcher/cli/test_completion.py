"""Completions of every command, as bash computes them; and the help of every command."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from lorikeet.launcher.cli.commands import COMMANDS
from lorikeet.launcher.cli.completion import PARSERS, main, script
from lorikeet.launcher.config.flags import FLAGS, MOST_USED
from lorikeet.launcher.config.settings import read

ROOT = Path(__file__).parents[3]


def test_every_command_is_completed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(PARSERS) == set(scripts)


def completed(*words: str) -> set[str]:
    """What bash proposes for the last word."""
    name = words[0].replace("-", "_")
    commands = (
        f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; compopt() {{ :; }}; "
        f"_shtab_{name} {words[0]} {shlex.quote(words[-1])} {shlex.quote(words[-2])}; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    run = subprocess.run(["bash", "-c", f"{script('bash')}\n{commands}"], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (["lorikeet-launcher", "--speculative-m"], {"--speculative-method"}),
        (["lorikeet-launcher", "--dtype", ""], set(FLAGS["dtype"].choices)),
        (["lorikeet-launcher", "--chunked-prefill", ""], {"true", "false"}),
        (["lorikeet-bench", "com"], {"compare"}),
        (["lorikeet-bench", "run", "--adapter-distribution", "z"], {"zipf"}),
        (["lorikeet-keys", "add", "--conc"], {"--concurrency"}),
        (["lorikeet-heads", "train", "--held"], {"--held-out"}),
        (["lorikeet-completion", "b"], {"bash"}),
        (["lorikeet", "ch"], {"chat"}),
        (["lorikeet", "serve", "--dtype", ""], set(FLAGS["dtype"].choices)),
        (["lorikeet", "bench", "run", "--adapter-distribution", "z"], {"zipf"}),
    ],
)
def test_what_bash_proposes(words: list[str], proposed: set[str]) -> None:
    assert completed(*words) == proposed


def test_files_are_proposed(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    assert completed("lorikeet-bench", "run", "--result", f"{tmp_path}/a.") == {f"{tmp_path}/a.json"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_shells_are_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in PARSERS)


@pytest.mark.parametrize("command", PARSERS)
def test_help_ends_with_examples_that_are_valid(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.yaml").write_text("port: 80\n")
    monkeypatch.chdir(tmp_path)
    help_text = PARSERS[command]().format_help()
    prefix = r"^ +(?:echo .* \| |source <\(|eval \"\$\()?"
    examples = re.findall(rf"{prefix}((?:{command}|lorikeet)\b[^\n]*)", help_text.split("examples:")[1], re.M)
    assert len(examples) >= 2, help_text
    for example in examples:
        line = re.split(r"  +| > |\)\"?$|\)\"? {2}", example)[0]
        check_example(*shlex.split(line))


def check_example(program: str, *words: str) -> None:
    """Raises SystemExit or LauncherError if the words are none of the program."""
    if program == "lorikeet":
        program, *words = words
        assert program in COMMANDS
        program = COMMANDS[program].script or program
    if program == "lorikeet-launcher":
        read(words, {}, "box")
    elif program == "chat":
        COMMANDS[program].parser().parse_args(words)
    elif words != ("COMMAND", "--help"):
        PARSERS[program]().parse_args(words)


def test_the_most_used_flags_come_first() -> None:
    flags = re.findall(r"^  (--[a-z-]+)", PARSERS["lorikeet-launcher"]().format_help(), re.M)
    assert flags[2 : 2 + len(MOST_USED)] == [f"--{name}" for name in MOST_USED]
    assert len(flags) == len(set(flags)) == len(FLAGS) + 2

"""`lorikeet-completion SHELL` prints completions of all commands, made from their parsers and the table of flags."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import shtab

from lorikeet.launcher.cli.client import command_parser
from lorikeet.launcher.cli.commands import COMMANDS, complete_parser
from lorikeet.launcher.config.flag import FlagKind
from lorikeet.launcher.config.flags import FLAGS

Completer = dict[str, str | dict[str, str]]

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "lorikeet": complete_parser,
    **{command.script: command.parser for command in COMMANDS.values() if command.script},
}
"""By script, what makes the parser of its command line."""
_FILES = ("config", "result", "csv", "html", "dataset", "file", "keys")
_FOLDERS = ("tokenizer", "out", "svg")
_EXAMPLES = """examples:
  lorikeet completion bash > ~/.local/share/bash-completion/completions/lorikeet
  source <(lorikeet completion bash)      in ~/.bashrc: all commands
  eval "$(lorikeet completion zsh)"       in ~/.zshrc, after compinit
"""


def script(shell: str) -> str:
    """Completions of every command."""
    return "\n".join(shtab.complete(_completed(command), shell) for command in PARSERS)


def _completed(command: str) -> argparse.ArgumentParser:
    """The command's parser, whose arguments know what completes them."""
    command_parser = PARSERS[command]()
    for program, action in _actions(command_parser):
        completer = _completer(program, action)
        if completer is not None:
            action.complete = completer  # type: ignore[attr-defined]
    return command_parser


def _actions(command_parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Each action, after the name of the program whose parser has it."""
    for action in command_parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        else:
            yield command_parser.prog, action


def _completer(program: str, action: argparse.Action) -> Completer | None:
    """Complete files or folders if the value is a path, and the parser's choices."""
    flag = FLAGS.get(action.dest) if program == "lorikeet-launcher" else None
    if flag is not None:
        if flag.choices and flag.kind is not FlagKind.SWITCH:
            action.choices = flag.choices
        elif flag.kind is FlagKind.BOOLEAN:
            action.choices = ("true", "false")
        if flag.must_exist:
            return shtab.DIRECTORY if flag.must_exist == "folder" else shtab.FILE
    if action.dest in _FILES or (flag is not None and flag.name.endswith("-file")):
        return shtab.FILE
    return shtab.DIRECTORY if action.dest in _FOLDERS else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process."""
    print(script(parser().parse_args(arguments).shell))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command_parser("lorikeet-completion", "Prints shell completions of all commands.", _EXAMPLES)
    result.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return result


if __name__ == "__main__":
    sys.exit(main())

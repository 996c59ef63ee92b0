"""`lorikeet-completion SHELL` prints completions of all commands, made from their parsers and the table of flags."""

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence

import shtab

from lorikeet.launcher.config.flag import FlagKind
from lorikeet.launcher.config.flags import FLAGS

Completer = dict[str, str | dict[str, str]]

PARSERS = {
    "lorikeet-launcher": "lorikeet.launcher.config.settings",
    "lorikeet-bench": "lorikeet.launcher.bench.main",
    "lorikeet-top": "lorikeet.launcher.cli.top",
    "lorikeet-generate": "lorikeet.launcher.cli.generate",
    "lorikeet-adapters": "lorikeet.adapters.check",
    "lorikeet-heads": "lorikeet.adapters.medusa.cli",
    "lorikeet-keys": "lorikeet.launcher.cli.keys",
    "lorikeet-replay": "lorikeet.launcher.cli.replay",
    "lorikeet-completion": "lorikeet.launcher.cli.completion",
}
"""By command, the module whose `parser()` is its command line; imported when it is needed."""
_FILES = ("config", "result", "csv", "html", "dataset", "file", "keys")
_FOLDERS = ("tokenizer", "out", "svg")
_EXAMPLES = """examples:
  lorikeet-completion bash > ~/.local/share/bash-completion/completions/lorikeet-launcher
  source <(lorikeet-completion bash)      in ~/.bashrc: all commands
  eval "$(lorikeet-completion zsh)"       in ~/.zshrc, after compinit
"""


def script(shell: str) -> str:
    """Completions of every command."""
    return "\n".join(shtab.complete(_completed(command), shell) for command in PARSERS)


def _completed(command: str) -> argparse.ArgumentParser:
    """The command's parser, whose arguments know what completes them."""
    command_parser: argparse.ArgumentParser = importlib.import_module(PARSERS[command]).parser()
    for action in _actions(command_parser):
        completer = _completer(command, action)
        if completer is not None:
            action.complete = completer  # type: ignore[attr-defined]
    return command_parser


def _actions(command_parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in command_parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        else:
            yield action


def _completer(command: str, action: argparse.Action) -> Completer | None:
    """Complete files or folders if the value is a path, and the parser's choices."""
    flag = FLAGS.get(action.dest) if command == "lorikeet-launcher" else None
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
    result = argparse.ArgumentParser(
        prog="lorikeet-completion",
        description="Prints shell completions of all commands.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return result


if __name__ == "__main__":
    sys.exit(main())

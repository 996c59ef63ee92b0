"""`lorikeet COMMAND`: every command by one name.

`lorikeet bench` is `lorikeet-bench`, and `lorikeet serve MODEL` is `lorikeet-launcher MODEL`. A module is imported if
its command is used, so that help and errors are fast.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lorikeet.proto.version import version


@dataclass(frozen=True)
class Command:
    """One command: the modules that run it and that have its parser, and what it does."""

    module: str
    """Has `main(arguments)`, which returns the exit code."""
    summary: str
    parser_module: str = ""
    """Has `parser()`; empty for the same module."""
    script: str = ""
    """The command's own script, empty if it has none."""

    def parser(self) -> argparse.ArgumentParser:
        """The command line, for help and completions."""
        parser: argparse.ArgumentParser = importlib.import_module(self.parser_module or self.module).parser()
        return parser


COMMANDS = {
    "serve": Command(
        "lorikeet.launcher.__main__", "serve a model: lorikeet serve MODEL", "lorikeet.launcher.config.settings",
        "lorikeet-launcher",
    ),
    "chat": Command("lorikeet.launcher.cli.chat", "talk to a model, with adapters, in the terminal"),
    "generate": Command("lorikeet.launcher.cli.generate", "stream one completion", script="lorikeet-generate"),
    "bench": Command("lorikeet.launcher.bench.main", "load a server and measure it", script="lorikeet-bench"),
    "top": Command("lorikeet.launcher.cli.top", "show what a server does now", script="lorikeet-top"),
    "adapters": Command("lorikeet.adapters.check", "check adapters before they are served", script="lorikeet-adapters"),
    "heads": Command("lorikeet.adapters.medusa.cli", "train and evaluate Medusa heads", script="lorikeet-heads"),
    "keys": Command("lorikeet.launcher.cli.keys", "add, list and remove API keys", script="lorikeet-keys"),
    "replay": Command("lorikeet.launcher.cli.replay", "repeat the request of a receipt", script="lorikeet-replay"),
    "completion": Command(
        "lorikeet.launcher.cli.completion", "print shell completions of all commands", script="lorikeet-completion"
    ),
}  # fmt: skip

_EXAMPLES = """examples:
  lorikeet serve owner/name --speculative-tokens 3
  lorikeet chat --adapter my-adapter
  lorikeet bench run --max-concurrency 16

lorikeet COMMAND --help explains a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h", "help"):
        print(parser().format_help())
        return 0
    if name == "--version":
        print(f"lorikeet {version()}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--help", "--version"], 1)
        hint = f": did you mean lorikeet {near[0]}?" if near else " (lorikeet --help lists all)"
        print(f"lorikeet: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(COMMANDS[name].module).main(rest)
    return code


def parser() -> argparse.ArgumentParser:
    """The command line; `main` reads only its first word."""
    parser = argparse.ArgumentParser(
        prog="lorikeet",
        description="Serves one base language model with thousands of adapters.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser


def complete_parser() -> argparse.ArgumentParser:
    """The command line with those of all commands, for completions."""
    complete = parser()
    subparsers = next(action for action in complete._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in COMMANDS.items():
        subparsers.choices[name] = command.parser()
    return complete


if __name__ == "__main__":
    sys.exit(main())

"""A command with subcommands, each in a module of its own that is imported only when it is asked for.

Such a module has a docstring that opens with its help, `add_arguments(parser)` and `run(options)`.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence


def dispatch(program: str, commands: Mapping[str, str], arguments: Sequence[str] | None = None) -> None:
    """`commands` maps the name of each subcommand to its module."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in commands:
        chooser = argparse.ArgumentParser(prog=program, epilog=f"{program} WHAT --help says more")
        chooser.add_argument("what", metavar="WHAT", choices=list(commands), help=", ".join(commands))
        chooser.parse_args(words)
    module = importlib.import_module(commands[words[0]])
    parser = argparse.ArgumentParser(prog=f"{program} {words[0]}", description=(module.__doc__ or "").split("\n\n")[0])
    module.add_arguments(parser)
    module.run(parser.parse_args(words[1:]))

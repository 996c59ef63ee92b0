"""A command with subcommands, each in its own module, which is imported only when it is used.

Such a module has a docstring that starts with its help, `add_arguments(parser)` and `run(options)`.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def dispatch(program: str, commands: Mapping[str, str], arguments: Sequence[str] | None = None) -> None:
    """`commands` maps the name of each subcommand to its module."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in commands:
        chooser = argparse.ArgumentParser(prog=program, epilog=f"see also {program} WHAT --help")
        chooser.add_argument("what", metavar="WHAT", choices=list(commands), help=", ".join(commands))
        chooser.parse_args(words)
    module = importlib.import_module(commands[words[0]])
    parser = argparse.ArgumentParser(prog=f"{program} {words[0]}", description=(module.__doc__ or "").split("\n\n")[0])
    module.add_arguments(parser)
    module.run(parser.parse_args(words[1:]))


def add_run_arguments(parser: argparse.ArgumentParser, work: str, minutes: float | None = None) -> None:
    """The options of all training commands; `minutes` between checkpoints add those of a run that can be stopped."""
    parser.add_argument("--work", type=Path, default=Path(".demo-train") / work, help="checkpoints, to resume a run")
    parser.add_argument("--seed", type=int, default=0)
    if minutes is not None:
        parser.add_argument("--stop-after", type=int, help="stop at this step, with a checkpoint to resume from")
        parser.add_argument("--checkpoint-minutes", type=float, default=minutes)
    add_device_argument(parser)


def add_threads_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; the last bits of the weights depend on it")


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    import torch

    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

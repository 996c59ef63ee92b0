"""The table of every flag: parser, `--help`, variables and docs/launcher.md are made from it, and from nothing else.

A row says what the flag does, or why it has no effect, or why it is refused until what it asks for works.
"""

from lorikeet.launcher.config.flag import Flag
from lorikeet.launcher.config.flags import adapters, machine, model, speculation

GROUPS: dict[str, tuple[Flag, ...]] = {**model.GROUPS, **speculation.GROUPS, **adapters.GROUPS, **machine.GROUPS}

FLAGS: dict[str, Flag] = {flag.name: flag for group in GROUPS.values() for flag in group}

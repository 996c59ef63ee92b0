"""Reads settings from a command line, an environment and a configuration file: every flag's value and its origin.

What values mean together is checked in rules.py.
"""

import argparse
import difflib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from lorikeet.launcher.config import config_file
from lorikeet.launcher.config.flag import Flag, FlagKind, Process, variable_of
from lorikeet.launcher.config.flags import FLAGS, FORMER_NAMES, GROUPS, MOST_USED
from lorikeet.launcher.exits import LauncherError, refuse

PREFIX = "LORIKEET_"
"""May precede the name of any flag's variable, so that it meets no variable of another program."""


@dataclass(frozen=True)
class Settings:
    """Every flag's value by its name; `origins` has the flag, variable or key by which it was set, if it was."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    deprecated: tuple[str, ...] = ()
    """A sentence for each deprecated name that was used."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_values(self, **values: Any) -> "Settings":
        """These settings with some values replaced (`max_total_tokens=…`)."""
        named = {name.replace("_", "-"): value for name, value in values.items()}
        if unknown := named.keys() - self.values.keys():
            raise KeyError(f"no such flags: {', '.join(sorted(unknown))}")
        return replace(self, values={**self.values, **named})

    def shown(self) -> dict[str, Any]:
        """Every value as it may be printed: secrets are hidden."""
        hidden = {name for name, flag in FLAGS.items() if flag.secret and self.values[name] not in (None, ())}
        return {name: "***" if name in hidden else value for name, value in self.values.items()}

    def fields(self, process: Process) -> dict[str, Any]:
        """The fields of a process's configuration that are values of flags."""
        return {flag.field: self[name] for name, flag in FLAGS.items() if process in flag.to and not flag.computed}


def read(arguments: Sequence[str], environment: Mapping[str, str], hostname: str) -> Settings:
    """The settings of `arguments` and `environment`. Flags override variables, and both override the file of --config.

    `hostname` is the machine's own name: shells set HOSTNAME to it, so that value is ignored.
    Raises LauncherError with one sentence.
    """
    arguments, environment, deprecated = _with_current_names(arguments, environment)
    parsed = vars(_parse(arguments))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    in_file = {} if parsed["config"] is None else config_file.read(parsed["config"])
    for name, flag in FLAGS.items():
        texts, origin = parsed[name], f"--{name}"
        if texts is None:
            texts, origin = _from_environment(flag, environment, hostname), flag.environment
        if texts is None and name in in_file:
            texts, origin = in_file[name].texts, in_file[name].origin
            if origin.startswith(f"{flag.formerly} in "):
                deprecated.append(f"{origin} is deprecated: use {name}")
        if texts is None:
            values[name] = flag.default
        else:
            origins[name], values[name] = origin, _value(flag, texts, origin)
    _translate(values, origins)
    return Settings(values, origins, tuple(deprecated))


def _translate(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Set the flags that flags of another server stand for. Raises LauncherError if both are given."""
    for name, flag in FLAGS.items():
        if not flag.stands_for or name not in origins:
            continue
        if flag.stands_for in origins:
            refuse(f"{origins[name]} and {origins[flag.stands_for]} are the same setting: give one")
        values[flag.stands_for], origins[flag.stands_for] = values[name], origins[name]


def _with_current_names(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str], list[str]]:
    """Deprecated names replaced by those of today, and a sentence for each that was used."""
    deprecated = []
    for old, new in FORMER_NAMES.items():
        if any(word.partition("=")[0] == f"--{old}" for word in arguments):
            arguments = [re.sub(f"^--{old}(?==|$)", f"--{new}", word) for word in arguments]
            deprecated.append(f"--{old} is deprecated: use --{new}")
        if text := environment.get(f"{PREFIX}{variable_of(old)}") or environment.get(variable_of(old)):
            environment = {variable_of(new): text, **environment}
            deprecated.append(f"{variable_of(old)} is deprecated: use {variable_of(new)}")
    return arguments, environment, deprecated


def asks_for_json(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether lines must be JSON, even if the other settings cannot be read."""
    flag = FLAGS["json-output"]
    if f"--{flag.name}" in arguments:
        return True
    try:
        return bool(flag.value(environment.get(flag.environment) or _in_file(arguments, flag) or "false"))
    except (ValueError, LauncherError):
        return False


def _in_file(arguments: Sequence[str], flag: Flag) -> str:
    """The text of a flag in the configuration file; empty if there is none. Raises LauncherError."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    paths = [path for word, path in itertools.pairwise(words) if word == "--config"]
    entry = config_file.read(paths[-1]).get(flag.name) if paths else None
    return "" if entry is None else str(entry.texts)


def help_page(arguments: Sequence[str]) -> str:
    """What --help asks for: the flags that are used most, or all of them. Empty if the arguments do not ask."""
    if "--help=all" in arguments:
        return parser().format_help()
    return parser(MOST_USED).format_help() if {"--help", "-h"} & set(arguments) else ""


def parser(names: Collection[str] = FLAGS.keys()) -> argparse.ArgumentParser:
    """The parser of the table's flags, or of some. Values stay texts: `read` converts those of all origins alike."""
    result = _FlagParser(
        prog="lorikeet-launcher",
        usage="lorikeet serve [MODEL] [flags]",
        description="Serves a base language model over HTTP: downloads it, starts its processes, ends them.",
        epilog=_EXAMPLES,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
    )
    result.add_argument("--help", "-h", action="store_true", help="print the most used flags; --help=all prints all")
    result.add_argument("--version", action="store_true", dest="version", help="print the version and exit")
    groups = {"Most used": tuple(FLAGS[name] for name in MOST_USED), **GROUPS}
    for title, flags in groups.items():
        group = result.add_argument_group(title)
        for flag in flags:
            if flag.name in names and (title == "Most used" or flag.name not in MOST_USED):
                _add(group, flag)
    return result


_EXAMPLES = """examples:
  lorikeet serve                                              the built-in demo model
  lorikeet serve owner/name --local-adapter-root ./adapters
  lorikeet serve owner/name --speculative-tokens 3 --port 8080
  lorikeet serve owner/name --draft-model-id owner/small --replicas 2
  lorikeet serve --config server.yaml --print-config

lorikeet-launcher is lorikeet serve, and MODEL is --model-id. Each flag may also be set by its environment variable,
with or without the prefix LORIKEET_. docs/launcher.md has all of this, and the exit codes.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wider columns for names, and lines of examples as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


class _FlagParser(argparse.ArgumentParser):
    """Errors are one sentence, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        refuse(message.removeprefix("argument ") + " (--help=all lists all flags)")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The texts of all flags. The first word may be the model."""
    words = list(arguments)
    model = words.pop(0) if words and not words[0].startswith("-") else None
    parsed, unknown = parser().parse_known_args(words)
    if model is not None:
        if getattr(parsed, "model-id") is not None:
            refuse(f"{model!r} and --model-id both name the model: give one")
        setattr(parsed, "model-id", model)
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            refuse(f"{word!r} belongs to no flag: name the model first, as in lorikeet serve MODEL")
        near = difflib.get_close_matches(word.lstrip("-"), [*FLAGS, "help", "version"], 1)
        hint = f": did you mean --{near[0]}?" if near else " (--help=all lists all flags)"
        refuse(f"unknown flag {word}{hint}")
    return parsed


def _add(group: "argparse._ArgumentGroup", flag: Flag) -> None:
    names = [f"--{flag.name}", *([f"-{flag.short}"] if flag.short else [])]
    text = help_text(flag).replace("%", "%%")
    if flag.kind is FlagKind.SWITCH:
        group.add_argument(*names, dest=flag.name, action="store_const", const="true", help=text)
    elif flag.repeated:
        group.add_argument(*names, dest=flag.name, action="extend", nargs="+", metavar="TEXT", help=text)
    else:
        metavar = "{true,false}" if flag.kind is FlagKind.BOOLEAN else flag.kind.value.upper()
        group.add_argument(*names, dest=flag.name, metavar=metavar, help=text)


def help_text(flag: Flag) -> str:
    """What `--help` shows about one flag."""
    text = flag.meaning
    if flag.stands_for:
        text += f" --{flag.stands_for}"
    if flag.choices:
        text += f" ({', '.join(flag.choices)})"
    if flag.no_effect:
        text += f"; no effect{f' on {flag.no_effect_on}' if flag.no_effect_on else ''}: {flag.no_effect}"
    if flag.refused:
        text += f"; rejected: {flag.refused}"
    return f"{text} [default: {flag.shown_default}{f', env: {flag.environment}' if flag.variable else ''}]"


def _from_environment(flag: Flag, environment: Mapping[str, str], hostname: str) -> str | list[str] | None:
    """The text of the flag's variable, with or without the prefix LORIKEET_; an empty variable is ignored."""
    names = (f"{PREFIX}{flag.environment}", flag.environment) if flag.variable else ()
    text = next((environment[name] for name in names if environment.get(name)), "")
    if not text or (flag.name == "hostname" and text.partition(".")[0] == hostname.partition(".")[0]):
        return None
    return [part.strip() for part in text.split(flag.separator) if part.strip()] if flag.repeated else text


def _value(flag: Flag, texts: str | list[str], origin: str) -> Any:
    try:
        return flag.value(texts) if isinstance(texts, str) else tuple(flag.value(text) for text in texts)
    except ValueError as error:
        refuse(f"{origin} {error}")

"""From a command line and an environment to settings: every flag's value, and whether somebody gave it.

Knows how flags are written; what they mean together is rules.py.
"""

import argparse
import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lorikeet.launcher.config import config_file
from lorikeet.launcher.config.flag import Flag, Kind
from lorikeet.launcher.config.flags import FLAGS, GROUPS
from lorikeet.launcher.exits import Exit, LauncherError


@dataclass(frozen=True)
class Settings:
    """Every flag's value by its name; `given` says by which flag or variable, for those that somebody gave."""

    values: Mapping[str, Any]
    given: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_values(self, **values: Any) -> "Settings":
        """These settings with some values worked out (`max_total_tokens=…`)."""
        named = {name.replace("_", "-"): value for name, value in values.items()}
        unknown = set(named) - set(self.values)
        if unknown:
            raise KeyError(f"no such flags: {', '.join(sorted(unknown))}")
        return Settings({**self.values, **named}, self.given)

    def shown(self) -> dict[str, Any]:
        """Every value as it may be printed: secrets are hidden."""
        hidden = {name for name, flag in FLAGS.items() if flag.secret and self.values[name] is not None}
        return {name: "***" if name in hidden else value for name, value in self.values.items()}


def read(arguments: Sequence[str], environment: Mapping[str, str], hostname: str) -> Settings:
    """The settings that `arguments` and `environment` ask for; a flag goes before a variable, both before a file.

    `hostname` is the machine's own name: HOSTNAME that says no more than that is what every shell sets.
    Raises LauncherError with one sentence.
    """
    parsed = vars(_parse(arguments))
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    in_file = {} if parsed["config"] is None else config_file.read(parsed["config"])
    for name, flag in FLAGS.items():
        texts, origin = parsed[name], f"--{name}"
        if texts is None:
            texts, origin = _from_environment(flag, environment, hostname), flag.environment
        if texts is None and name in in_file:
            texts, origin = in_file[name].texts, in_file[name].origin
        if texts is None:
            values[name] = flag.default
            continue
        given[name] = origin
        values[name] = _value(flag, texts, origin)
    return Settings(values, given)


def asks_for_json(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether lines are to be JSON, also where the rest cannot be read."""
    flag = FLAGS["json-output"]
    if f"--{flag.name}" in arguments:
        return True
    try:
        return bool(flag.value(environment.get(flag.environment) or _in_file(arguments, flag) or "false"))
    except (ValueError, LauncherError):
        return False


def _in_file(arguments: Sequence[str], flag: Flag) -> str:
    """What the configuration file says of a flag that is not repeated; empty for nothing. Raises LauncherError."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    paths = [path for word, path in itertools.pairwise(words) if word == "--config"]
    given = config_file.read(paths[-1]).get(flag.name) if paths else None
    return "" if given is None else str(given.texts)


def parser() -> argparse.ArgumentParser:
    """The parser that the table makes. Values stay texts: what they stand for is worked out in one place for both
    flags and variables.
    """
    result = _Parser(
        prog="lorikeet-launcher",
        usage="lorikeet-launcher [--model-id ID] [flags]",
        description="Serves a base language model over HTTP: downloads it, starts its processes and ends them.",
        epilog="Each flag may be set by the variable named beside it. Exit codes are listed in docs/launcher.md.",
        allow_abbrev=False,
        add_help=False,
    )
    result.add_argument("--help", "-h", action="help", help="print this and end")
    result.add_argument("--version", action="store_true", dest="version", help="print the version and end")
    for title, flags in GROUPS.items():
        group = result.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return result


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise LauncherError(Exit.ARGUMENT_VALIDATION, message.removeprefix("argument ") + " (--help lists all flags)")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parsed, unknown = parser().parse_known_args(list(arguments))
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise LauncherError(Exit.ARGUMENT_VALIDATION, f"{word!r} belongs to no flag (--help lists all flags)")
        near = difflib.get_close_matches(word.lstrip("-"), FLAGS, 1)
        hint = f": did you mean --{near[0]}?" if near else " (--help lists all flags)"
        raise LauncherError(Exit.ARGUMENT_VALIDATION, f"unknown flag {word}{hint}")
    return parsed


def _add(group: "argparse._ArgumentGroup", flag: Flag) -> None:
    names = [f"--{flag.name}", *([f"-{flag.short}"] if flag.short else [])]
    text = help_text(flag).replace("%", "%%")
    if flag.kind is Kind.SWITCH:
        group.add_argument(*names, dest=flag.name, action="store_const", const="true", help=text)
    elif flag.repeated:
        group.add_argument(*names, dest=flag.name, action="append", metavar="TEXT", help=text)
    else:
        metavar = "{true,false}" if flag.kind is Kind.BOOLEAN else flag.kind.value.upper()
        group.add_argument(*names, dest=flag.name, metavar=metavar, help=text)


def help_text(flag: Flag) -> str:
    """What `--help` says about one flag."""
    text = flag.meaning
    if flag.choices:
        text += f" ({', '.join(flag.choices)})"
    if flag.no_effect:
        text += f"; no effect{f' on {flag.no_effect_on}' if flag.no_effect_on else ''}: {flag.no_effect}"
    if flag.refused:
        text += f"; refused: {flag.refused}"
    marks = [f"default: {flag.shown_default}", *([f"env: {flag.environment}"] if flag.variable else [])]
    return f"{text} [{', '.join(marks)}]"


def _from_environment(flag: Flag, environment: Mapping[str, str], hostname: str) -> str | list[str] | None:
    """The text that the flag's variable holds; a variable without text is as good as none."""
    text = environment.get(flag.environment, "") if flag.variable else ""
    if not text or (flag.name == "hostname" and text.partition(".")[0] == hostname.partition(".")[0]):
        return None
    return [part.strip() for part in text.split(flag.separator) if part.strip()] if flag.repeated else text


def _value(flag: Flag, texts: str | list[str], origin: str) -> Any:
    try:
        if isinstance(texts, list):
            return tuple(flag.value(text) for text in texts)
        return flag.value(texts)
    except ValueError as error:
        raise LauncherError(Exit.ARGUMENT_VALIDATION, f"{origin} {error}") from None

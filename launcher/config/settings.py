"""Reads settings from a command line, an environment and a configuration file: every flag's value and its origin.

The file of `--config` is YAML, with flags under their own names or as keys of AutoGluon-RAG's generator; its values
become texts, as on a command line. What values mean together is checked in rules.py.
"""

import argparse
import difflib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

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
        """Return a copy of the settings with some values replaced (`max_total_tokens=…`)."""
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
    in_file = {} if parsed["config"] is None else read_file(parsed["config"])
    for name, flag in FLAGS.items():
        texts, origin = parsed[name], f"--{name}"
        if texts is None:
            texts, origin = _from_environment(flag, environment, hostname)
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
        text = _from_environment(flag, environment, "")[0] or _in_file(arguments, flag) or "false"
        return bool(flag.value(str(text)))
    except (ValueError, LauncherError):
        return False


def _in_file(arguments: Sequence[str], flag: Flag) -> str:
    """The text of a flag in the configuration file; empty if there is none. Raises LauncherError."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    paths = [path for word, path in itertools.pairwise(words) if word == "--config"]
    entry = read_file(paths[-1]).get(flag.name) if paths else None
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


def _from_environment(flag: Flag, environment: Mapping[str, str], hostname: str) -> tuple[str | list[str] | None, str]:
    """The text of the flag's variable, with or without the prefix LORIKEET_, and the variable's name.

    An empty variable is ignored, and so is HOSTNAME where it is the machine's own name.
    """
    names = (f"{PREFIX}{flag.environment}", flag.environment) if flag.variable else ()
    name = next((name for name in names if environment.get(name)), "")
    if not name or (name == "HOSTNAME" and environment[name].partition(".")[0] == hostname.partition(".")[0]):
        return None, ""
    text = environment[name]
    return ([part.strip() for part in text.split(flag.separator) if part.strip()] if flag.repeated else text), name


def _value(flag: Flag, texts: str | list[str], origin: str) -> Any:
    try:
        return flag.value(texts) if isinstance(texts, str) else tuple(flag.value(text) for text in texts)
    except ValueError as error:
        refuse(f"{origin} {error}")


Texts = str | list[str]


@dataclass(frozen=True)
class FileValue:
    """The value of one flag."""

    texts: Texts
    origin: str
    """The key and the file, for messages."""


def read_file(path: str) -> dict[str, FileValue]:
    """The values in the file at `path`, by flag. Raises LauncherError with one sentence, which names unknown keys."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        refuse(f"--config {path} cannot be read: {error.strerror}")
    except (yaml.YAMLError, ValueError) as error:
        refuse(f"--config {path} is not YAML: {' '.join(str(error).split())}")
    result: dict[str, FileValue] = {}
    for key, name, value in _flags(_mapping(content, "what is", path), path):
        origin = f"{key} in {path}"
        if name in result:
            refuse(f"{origin} and {result[name].origin} are two values of --{name}: give one")
        if value is not None:
            result[name] = FileValue(_texts(name, value, origin), origin)
    return result


_Key = dict[str, Any] | str
_DRAFT: dict[str, _Key] = {
    "model": "draft-model-id",
    "num_speculative_tokens": "speculative-tokens",
    "method": "speculative-method",
    "prompt_lookup_max": "ngram-max",
    "prompt_lookup_min": "ngram-min",
}
_GENERATOR: dict[str, _Key] = {
    "generator_model_name": "model-id",
    "generator_model_platform": "",
    "generator_model_platform_args": {
        "hf_model_params": {"torch_dtype": "dtype", "revision": "revision", "trust_remote_code": "trust-remote-code"},
        "hf_generate_params": {
            "assistant_model": "draft-model-id",
            "assistant_tokenizer": "draft-tokenizer-id",
            "num_assistant_tokens": "speculative-tokens",
            "num_assistant_tokens_schedule": "speculative-schedule",
            "prompt_lookup_num_tokens": "speculative-tokens",
        },
        "vllm_init_params": {
            "speculative_model": "draft-model-id",
            "num_speculative_tokens": "speculative-tokens",
            "ngram_prompt_lookup_max": "ngram-max",
            "ngram_prompt_lookup_min": "ngram-min",
            "speculative_config": _DRAFT,
            "dtype": "dtype",
            "revision": "revision",
            "max_model_len": "max-total-tokens",
            "trust_remote_code": "trust-remote-code",
        },
    },
}
"""AutoGluon-RAG's keys, spelled as in Transformers and vLLM, and the flags that they set. The platform sets none."""
_OF_REQUESTS = ("hf_generate_params", "vllm_sampling_params")
_PLATFORMS = ("huggingface", "vllm")
_LOOKUP = "[ngram]"
"""vLLM's `speculative_model` for prompt lookup."""


def _flags(content: dict[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """Key, flag and value of each entry of the file."""
    for key, value in content.items():
        name = FORMER_NAMES.get(key, key.replace("_", "-"))
        if key == "generator":
            yield from _walk(_mapping(value, key, path), _GENERATOR, key, path)
        elif key in _GENERATOR:
            yield from _walk({key: value}, _GENERATOR, "", path)
        elif name in FLAGS and name != "config":
            yield key, name, value
        else:
            refuse(f"{key} in {path} is neither a flag nor a key of AutoGluon-RAG's generator")


def _walk(values: dict[str, Any], known: dict[str, _Key], above: str, path: str) -> Iterator[tuple[str, str, Any]]:
    for key, value in values.items():
        full_key = f"{above}.{key}" if above else key
        meaning = known.get(key)
        if isinstance(meaning, dict):
            yield from _walk(_mapping(value, full_key, path), meaning, full_key, path)
        elif meaning is None:
            of_requests = any(part in _OF_REQUESTS for part in full_key.split("."))
            why = "belongs to requests: clients send it" if of_requests else "is not a known key"
            refuse(f"{full_key} in {path} {why}")
        elif key == "generator_model_platform":
            if value not in _PLATFORMS:
                refuse(f"{full_key} in {path} must be one of {', '.join(_PLATFORMS)}, not {value!r}")
        elif value == _LOOKUP:
            yield full_key, "speculative-method", "lookup"
        else:
            yield full_key, meaning, "draft" if (key, value) == ("method", "draft_model") else value
            if key == "prompt_lookup_num_tokens":
                yield full_key, "speculative-method", "lookup"


def _mapping(value: Any, what: str, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        refuse(f"{what} in {path} must be keys and values")
    return value


def _texts(name: str, value: Any, origin: str) -> Texts:
    """A value as written after the flag on a command line."""
    if isinstance(value, list) and FLAGS[name].repeated:
        return [_text(one, origin) for one in value]
    text = _text(value, origin)
    return [text] if FLAGS[name].repeated else text


def _text(value: Any, origin: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        refuse(f"{origin} must be one value, not {value!r}")
    return str(value)

"""`--config FILE`: flags from a YAML file, under their own names or as keys of AutoGluon-RAG's generator.

Values become texts, as on a command line; settings.py converts those.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lorikeet.launcher.config.flags import FLAGS, FORMER_NAMES
from lorikeet.launcher.exits import refuse

Texts = str | list[str]


@dataclass(frozen=True)
class FileValue:
    """The value of one flag."""

    texts: Texts
    origin: str
    """The key and the file, for messages."""


def read(path: str) -> dict[str, FileValue]:
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

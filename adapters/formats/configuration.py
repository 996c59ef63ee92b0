"""The small files of an adapter: validates `adapter_config.json`, and compares tokenizer files with the base's.

Checked are the fields' types and bounds, and whether the features are served; PEFT interprets the fields for a base
(`changes`). Only the base's tokenizer is ever used, so an adapter whose token ids differ is rejected. Imports no torch.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from lorikeet.adapters.errors import AdapterInvalid, NotServed
from lorikeet.adapters.formats import added_tokens
from lorikeet.adapters.formats.kinds import KINDS, VARIANTS, is_set, kind_of
from lorikeet.adapters.sources.base import CONFIG, MAX_CONFIG_BYTES, MAX_SMALL_BYTES
from lorikeet.proto import pooling
from lorikeet.proto.config_file import is_number

MAX_RANK = 512
MOST_RANK = {"cpu": 4096, "cuda": 512}
"""The largest rank of a module that shards compute, by type of device. Other types than LoRA may have more than 512."""
SERVED_KINDS = ("linear", "embedding", "experts", "router", "norm", "heads", "virtual")
"""Kinds of changes to a module that shards support, and Medusa heads."""
_MAX_NAMES = 20_000
_MAX_NAME_LEN = 512
_LARGEST = 1e9
_MAX_PATTERN_LEN = 8192
_DEEPEST = 8
_PLAIN = re.compile(r"[\w.-]*")
"""Names, in which no repetition can be nested."""

_CHANGES_BASE = ("pissa", "corda", "olora", "loftq")
"""Initialisations that PEFT repeats when it loads an adapter. LoRA-GA is not one: it needs gradients."""
_UNSERVED = {
    "layer_replication": "replicated layers",
    "arrow_config": "mixing the adapters of several files for each token (Arrow)",
    "megatron_config": "Megatron layers",
    "sample_at_inference": "a change that is drawn at random for every token",
}
"""Fields that make PEFT compute something that is not served."""
INVOCATION = "alora_invocation_tokens"
"""The token ids from whose last occurrence in the prompt on an activated LoRA (aLoRA) applies: Greenewald et al. 2025
(arXiv 2504.12397), in PEFT's format.
"""
_MAX_INVOCATION = 256
_NOT_ACTIVATED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules (`modules_to_save`)",
    "target_parameters": "adapters on parameters (`target_parameters`)",
    "trainable_token_indices": "single trained tokens",
    **{field: f"`{field}`" for field in VARIANTS},
}
"""What PEFT cannot activate from a token on."""
CAUSAL_LM = "CAUSAL_LM"
_TASKS_OF: dict[str | None, tuple[str, ...]] = {
    None: (CAUSAL_LM,),
    pooling.EMBED: ("FEATURE_EXTRACTION", CAUSAL_LM),
    pooling.CLASSIFY: ("SEQ_CLS",),
    pooling.TOKEN_CLASSIFY: ("TOKEN_CLS",),
}
"""PEFT's task types by the base's task."""
TASKS = tuple(dict.fromkeys(name for names in _TASKS_OF.values() for name in names))
_FLAGS = ("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "ensure_weight_tying")
_ONLY_TRAINING = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "revision", "peft_type", "task_type", "inference_mode",
        "peft_version", "init_lora_weights", "loftq_config", "eva_config", "corda_config",
        "lora_ga_config", "megatron_core", "runtime_config", "unsloth_fixed",
    }
)  # fmt: skip
"""Fields that do not change what a trained adapter computes, once `init_lora_weights` is checked."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})")


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: Any) -> bool:
    return is_number(value, _LARGEST)


def _is_probability(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_NAME_LEN


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 20


def _are(check: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_NAMES and all(map(check, value))


def _are_names(value: Any) -> bool:
    return _are(_is_name, value)


def _are_targets(value: Any) -> bool:
    return _are_names(value) or (isinstance(value, str) and len(value) <= _MAX_PATTERN_LEN)


def _are_layers(value: Any) -> bool:
    return _is_index(value) or _are(_is_index, value)


def _pattern(check: Callable[[Any], bool], value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > _MAX_NAMES:
        return False
    return all(len(key) <= _MAX_PATTERN_LEN and check(element) for key, element in value.items())


def _are_tokens(value: Any) -> bool:
    if isinstance(value, dict):
        return all(len(name) <= _MAX_NAME_LEN and _are(_is_index, ids) for name, ids in value.items())
    return _are(_is_index, value)


def _are_settings(value: Any) -> bool:
    """Plain values of any names, no number of them so large that PEFT would need much memory for it."""
    if isinstance(value, dict | list):
        elements = value.values() if isinstance(value, dict) else value
        return len(value) <= _MAX_NAMES and all(map(_are_settings, elements))
    return value is None or isinstance(value, bool) or _is_number(value) or _are_targets(value)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, f"a whole number from 1 to {MAX_RANK}"),
    "lora_alpha": (_is_number, f"a number up to {_LARGEST:g}"),
    "lora_dropout": (_is_probability, "a number from 0 to 1"),
    **dict.fromkeys(("target_modules", "exclude_modules"), (_are_targets, "a list of names or a pattern")),
    **dict.fromkeys(("target_parameters", "modules_to_save"), (_are_names, "a list of names")),
    "layers_to_transform": (_are_layers, "layer numbers"),
    "layers_pattern": (_are_targets, "names of layer lists"),
    "rank_pattern": (partial(_pattern, _is_rank), f"ranks from 1 to {MAX_RANK} by pattern"),
    "alpha_pattern": (partial(_pattern, _is_number), f"numbers up to {_LARGEST:g} by pattern"),
    **dict.fromkeys(_FLAGS, (lambda value: isinstance(value, bool), "true or false")),
    "bias": (lambda value: value in ("none", "all", "lora_only"), "one of none, all, lora_only"),
    "trainable_token_indices": (_are_tokens, "token ids, or token ids by the name of a module"),
    "use_qalora": (lambda value: isinstance(value, bool), "true or false"),
    "qalora_group_size": (_is_index, "a whole number"),
    **dict.fromkeys(
        ("use_bdlora", "monteclora_config", "kasa_config", "velora_config"), (_are_settings, "an object of settings")
    ),
}
"""Fields that PEFT computes with, and their permitted values."""
_SAME = frozenset(
    ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "alpha_pattern")
)
"""Fields that mean the same for every type of adapter."""
_ANY = (_are_settings, "a number, a text, or a list or an object of these")
_NEVER_NULL = frozenset({"r", "lora_alpha", "lora_dropout", "bias", "rank_pattern", "alpha_pattern"})
"""Fields for which PEFT does not accept null. For others, null stands for the default."""


def parse(content: bytes) -> dict[str, Any]:
    """The object in the file, not yet validated. Raises AdapterInvalid."""
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterInvalid(f"{CONFIG} has {len(content)} bytes; the limit is {MAX_CONFIG_BYTES}")
    try:
        values = json.loads(content.decode(), parse_constant=_refuse_constant)  # of bytes, it reads UTF-16 and a BOM
    except (ValueError, RecursionError):
        raise AdapterInvalid(f"{CONFIG} is not JSON") from None
    if not isinstance(values, dict):
        raise AdapterInvalid(f"{CONFIG} is not a JSON object")
    if _depth(values) > _DEEPEST:
        raise AdapterInvalid(f"{CONFIG} is nested deeper than {_DEEPEST} levels")
    return values


def canonical(values: dict[str, Any]) -> bytes:
    """The canonical form of a configuration: equal bytes regardless of order and white space."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def served(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that determine the computation, validated. Raises NotServed or AdapterInvalid."""
    _check_kind(values)
    for field, meaning in _UNSERVED.items():
        if is_set(values.get(field)):
            raise NotServed(f"{meaning} (`{field}`) is not served")
    invocation_ids(values)
    _check_version(values)
    _check_start(values.get("init_lora_weights"))
    is_lora = values["peft_type"].upper() == "LORA"
    fields = set(_FIELDS) if is_lora else _fields_of(values["peft_type"]) - _ONLY_TRAINING
    chosen = {
        field: values[field]
        for field in sorted(fields)
        if field in values and (values[field] is not None or (is_lora and field in _NEVER_NULL))
    }
    for field, value in chosen.items():
        check, meaning = _FIELDS[field] if is_lora or field in _SAME else _ANY
        if not check(value):
            raise AdapterInvalid(f"`{field}` of {CONFIG} is {_short(value)}; it must be {meaning}")
    chosen.pop("lora_dropout", None)  # PEFT rejects wrong values, and computes without dropout
    return chosen


def _fields_of(peft_type: str) -> set[str]:
    """The settings of a type of adapter. Raises NotServed for one that the installed PEFT does not have."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    config = PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type.upper())
    if config is None:
        installed = metadata.version("peft")
        raise NotServed(
            f"adapters of `peft_type` {peft_type} need a newer PEFT than {installed}, which this server has"
        )
    return {field.name for field in dataclasses.fields(config)}


def is_folded(values: dict[str, Any]) -> bool:
    """Whether the adapter's change to each module is computed when it is read: of an unknown type, nothing is."""
    return str(values.get("peft_type")).upper() in KINDS and kind_of(values).how != "lora"


def unknown(values: dict[str, Any]) -> list[str]:
    """Settings that have a value and are not PEFT's. As in PEFT, they have no effect."""
    known = frozenset((*_FIELDS, *_UNSERVED, *_ONLY_TRAINING, INVOCATION))
    if (peft_type := str(values.get("peft_type", "LORA")).upper()) != "LORA":
        known = _ONLY_TRAINING | _fields_of(peft_type)
    return sorted(field for field, value in values.items() if value and field not in known)


def invocation_ids(values: dict[str, Any]) -> tuple[int, ...]:
    """The invocation tokens of an activated LoRA; empty for any other adapter. Raises NotServed or AdapterInvalid."""
    ids = values.get(INVOCATION)
    if not ids or str(values.get("peft_type")).upper() != "LORA":
        return ()
    if not _are(_is_index, ids) or len(ids) > _MAX_INVOCATION:
        raise AdapterInvalid(f"`{INVOCATION}` of {CONFIG} must be a list of at most {_MAX_INVOCATION} token ids")
    for field, meaning in _NOT_ACTIVATED.items():
        if is_set(values.get(field)):
            raise NotServed(f"{meaning} together with `{INVOCATION}` (aLoRA) is not served")
    if values.get("bias") not in (None, "none"):
        raise NotServed(f"`bias` together with `{INVOCATION}` (aLoRA) is not served")
    return tuple(ids)


def check_activated(kinds: Iterable[str], ids: Sequence[int]) -> None:
    """Raises NotServed if an activated LoRA changes anything but linear layers."""
    other = next((kind for kind in kinds if kind != "linear"), None)
    if ids and other is not None:
        raise NotServed(f"an adapter of the kind `{other}` together with `{INVOCATION}` (aLoRA) is not served")


def has_patterns(values: dict[str, Any]) -> bool:
    """Whether PEFT will match module names with expressions of this configuration, which may take forever."""
    texts: list[Any] = [values.get(field) for field in ("target_modules", "exclude_modules", "layers_pattern")]
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = values.get(field)
        texts += pattern if isinstance(pattern, dict) else ()
    several = values.get("layers_pattern")
    texts += several if isinstance(several, list) else ()
    return any(isinstance(text, str) and not _PLAIN.fullmatch(text) for text in texts)


def _check_kind(values: dict[str, Any]) -> None:
    kind = values.get("peft_type")
    if not isinstance(kind, str):
        raise AdapterInvalid(f"{CONFIG} has no `peft_type`, such as LORA")
    known = KINDS.get(kind.upper())
    if known is None:
        raise NotServed(f"adapters of `peft_type` {kind[:40]} are not served: this server does not know the type")
    if known.how == "refused":
        raise NotServed(f"adapters of `peft_type` {kind[:40]} are not served: {known.reason}")
    task = values.get("task_type")
    if task is not None and task not in TASKS:
        raise NotServed(f"an adapter for the task {_short(task)} is not served, only {', '.join(TASKS)}")


def check_task(values: dict[str, Any], task: str | None) -> None:
    """Raise NotServed for an adapter that was made for another task than the base's (None: the base generates text)."""
    if task is not None and values.get(INVOCATION):
        raise NotServed(f"activation by invocation tokens (`{INVOCATION}`) is not served with this base")
    task_type, served_tasks = values.get("task_type"), _TASKS_OF[task]
    if task_type is not None and task_type not in served_tasks:
        known = " and ".join(served_tasks)
        raise NotServed(f"an adapter for the task {_short(task_type)} is not served with this base, only {known}")


def _check_version(values: dict[str, Any]) -> None:
    """Raises NotServed for an unknown setting of a newer PEFT, which may change what the adapter computes."""
    fields, saved_by = unknown(values), values.get("peft_version")
    if not fields or not isinstance(saved_by, str):
        return
    installed = metadata.version("peft")
    if _major_minor(saved_by) > _major_minor(installed):
        raise NotServed(
            f"`{fields[0][:60]}` of {CONFIG} is not a setting of PEFT {installed}, which this server has, and the "
            f"adapter was saved by PEFT {saved_by[:20]}: remove it if it has no effect, or update the server's PEFT"
        )


def _major_minor(version: str) -> tuple[int, ...]:
    match = _VERSION.match(version)
    return () if match is None else tuple(map(int, match.groups()))


def _check_start(start: Any) -> None:
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        problem = f"`init_lora_weights` is {_short(start)}, which changes the base's own weights"
        raise NotServed(f"{problem}: convert the adapter with PEFT's `path_initial_model_for_weight_conversion`")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _depth(value: Any) -> int:
    """The nesting depth of objects and lists, counted without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        current, depth = waiting.pop()
        deepest = max(deepest, depth)
        if depth > _DEEPEST:
            break
        if isinstance(current, dict | list):
            inner = current.values() if isinstance(current, dict) else current
            waiting.extend((child, depth + 1) for child in inner if isinstance(child, dict | list))
    return deepest


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_WHOLE = "tokenizer.json"
_ADDED = "added_tokens.json"
_SETTINGS = "tokenizer_config.json"
_MAX_CACHED = 1024


class Tokenizers:
    """Compares tokenizers with the base's and caches the results: many adapters have the same files."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._differences: dict[bytes, str | None] = {}

    def check(self, folder: Path, num_ids: int = 0) -> None:
        """As `check_files`, of the files in a folder."""
        files = {name: _read(folder / name) for name in (_WHOLE, _ADDED, _SETTINGS)}
        self.check_files({name: content for name, content in files.items() if content is not None}, num_ids)

    def check_files(self, files: dict[str, bytes], num_ids: int = 0) -> None:
        """Check files by name; other files are ignored. Raises AdapterInvalid with the first token that differs. Tokens
        with ids below `num_ids` may be added to the base's; none where it is 0.
        """
        files = {name: content for name, content in files.items() if name in (_WHOLE, _ADDED, _SETTINGS)}
        if not files or files.get(_WHOLE) == self._own_file:
            return
        contents = [files.get(name, b"") for name in (_WHOLE, _ADDED, _SETTINGS)]
        key = hashlib.sha256(b"\0".join([str(num_ids).encode(), *contents])).digest()
        if key not in self._differences:
            if len(self._differences) >= _MAX_CACHED:
                self._differences.clear()
            self._differences[key] = self._difference(files, num_ids)
        if (difference := self._differences[key]) is not None:
            raise AdapterInvalid(difference)

    @cached_property
    def _own_file(self) -> bytes | None:
        return _read(self._model_path / _WHOLE)

    @cached_property
    def _own(self) -> dict[str, int]:
        """Token → id, empty if the base has no tokenizer that can be compared."""
        if self._own_file is not None:
            return _tokens(json.loads(self._own_file))
        from transformers import AutoTokenizer

        try:
            return dict(AutoTokenizer.from_pretrained(self._model_path, local_files_only=True).get_vocab())
        except (ValueError, OSError, KeyError, ImportError):
            return {}

    def _difference(self, files: dict[str, bytes], num_ids: int) -> str | None:
        """The end of a sentence, or None if every token of the adapter is one of the base, or may be added to them."""
        base_tokens = self._own
        if not base_tokens:
            return None
        try:
            settings = json.loads(files.get(_SETTINGS, b"{}"))
            tokens = _all_tokens(files, settings)
            padding = _content(settings.get("pad_token"))
            added = added_tokens.read(files, base_tokens).tokens if num_ids else ()
        except AdapterInvalid as error:
            return str(error)
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return "its tokenizer files cannot be read"
        if added and added[-1].id >= num_ids:
            return f"its token {added[-1].content[:40]!r} has the id {added[-1].id}, but its last row is {num_ids - 1}"
        own = {token.content: token.id for token in added}
        for token, number in tokens.items():
            if own.get(token) == number:
                continue
            # a token that is only used for padding in training never reaches the adapter
            if base_tokens.get(token) != number and (token != padding or token in base_tokens):
                has = f"{base_tokens[token]} in the base's" if token in base_tokens else "is not in the base's"
                return (
                    f"it was trained with another tokenizer: token {token[:40]!r} is {str(number)[:40]} there and {has}"
                )
        return None


def _all_tokens(files: dict[str, bytes], settings: Any) -> dict[str, int]:
    tokens: dict[str, int] = {}
    if _WHOLE in files:
        tokens.update(_tokens(json.loads(files[_WHOLE])))
    if _ADDED in files:
        tokens.update({str(token): int(number) for token, number in json.loads(files[_ADDED]).items()})
    for number, entry in (settings.get("added_tokens_decoder") or {}).items():
        tokens[str(_content(entry))] = int(number)
    return tokens


def _tokens(content: Any) -> dict[str, int]:
    vocab = content["model"]["vocab"]
    tokens = dict(vocab) if isinstance(vocab, dict) else {str(entry[0]): number for number, entry in enumerate(vocab)}
    tokens.update({str(entry["content"]): entry["id"] for entry in content.get("added_tokens") or ()})
    return tokens


def _content(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SMALL_BYTES + 1)
    except OSError:
        return None
    if len(content) > MAX_SMALL_BYTES:
        raise AdapterInvalid(f"{path.name} has more than {MAX_SMALL_BYTES} bytes")
    return content

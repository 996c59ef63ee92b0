"""Whether a model can be served, from its config.json and the names of its files: before its weights are downloaded.

A shard looks closer once it loads the model; what is found here is found within a second.
"""

import importlib.util
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import refuse
from lorikeet.proto import pooling

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_OTHER_INPUTS = {"vision_config": "images", "audio_config": "audio"}
_HEADS = ("num_attention_heads", "num_key_value_heads")
_STRETCHED = ("linear", "yarn")
"""Types of rotary scaling whose positions are a multiple of those in the configuration."""


@dataclass(frozen=True)
class Use:
    """What a model is wanted for."""

    num_ranks: int = 1
    max_total_tokens: int | None = None
    """None: any number of positions will do."""
    needs_tokenizer: bool = True

    @classmethod
    def of(cls, settings: Settings, num_ranks: int) -> "Use":
        """Use as the base model."""
        is_any = settings["allow-long-max-total-tokens"] or settings["shard-address"]
        total = None if is_any else settings["max-total-tokens"]
        return cls(num_ranks, total, needs_tokenizer=settings["shard-listen"] is None)


def check_files(id: str, names: Collection[str], use: Use) -> None:
    """Raise LauncherError if files with these names are no model that can be served."""
    if "config.json" not in names:
        if "adapter_config.json" in names:
            refuse(f"{id} is an adapter, not a model: give its base as --model-id, and it as adapter_id in requests")
        refuse(f"{id} has no config.json: it is not a model")
    if use.needs_tokenizer and "tokenizer.json" not in names:
        refuse(f"{id} has no tokenizer.json: convert its tokenizer to a fast one (AutoTokenizer, save_pretrained)")


def check_config(id: str, config: dict[str, Any], use: Use) -> None:
    """Raise LauncherError if a model of this config.json cannot be served."""
    kind, text = config.get("model_type"), _text(config)
    if reason := unsupported(config):
        refuse(f"{id} ({kind}) cannot be served: {reason}")
    for name in _HEADS if use.num_ranks > 1 else ():
        count = text.get(name)
        if isinstance(count, int) and count % use.num_ranks:
            refuse(f"{id} ({kind}) cannot be split by --num-shard {use.num_ranks}: its {name} are {count}")
    longest = num_positions(config)
    if longest is not None and use.max_total_tokens is not None and use.max_total_tokens > longest:
        refuse(
            f"--max-total-tokens {use.max_total_tokens} is above the {longest} positions of {id}: lower it, or give"
            " --allow-long-max-total-tokens (its output may be nonsense there)"
        )


def unsupported(config: dict[str, Any]) -> str:
    """Why no model of this configuration is served; empty if none is known."""
    if config.get("is_encoder_decoder") is True:
        return "it is an encoder-decoder, and only decoders are served"
    for name, other in _OTHER_INPUTS.items():
        if config.get(name) is not None:
            return f"it takes {other}, and only text models are served"
    if pooling.is_known(config):
        return ""
    kind, code = config.get("model_type"), config.get("auto_map")
    if isinstance(code, dict) and "AutoModelForCausalLM" in code:
        return ""
    if isinstance(kind, str) and (known := _architectures()) and kind not in known:
        return f"transformers has no causal language model of model_type {kind!r}"
    return ""


def num_positions(config: dict[str, Any]) -> int | None:
    """Positions that the model was made for, with its rotary scaling; None if the configuration does not say."""
    for values in (config, _text(config)):
        for field in _LENGTH_FIELDS:
            length = values.get(field)
            if isinstance(length, int) and length > 1:
                return max(length, _stretched(values, length)) - pooling.num_reserved_positions(values)
    return None


def _stretched(values: dict[str, Any], length: int) -> int:
    """Positions with rotary scaling by a factor."""
    scaling = values.get("rope_scaling") or values.get("rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) not in _STRETCHED:
        return length
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings") or length
    return int(original * factor) if isinstance(factor, int | float) and isinstance(original, int) else length


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part about the language model."""
    values = config.get("text_config")
    return values if isinstance(values, dict) else config


@cache
def _architectures() -> frozenset[str]:
    """The `model_type`s of transformers' causal language models, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    except OSError:
        return frozenset()
    table = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = .*?^\)", source, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'^\s*\("([^"]+)",', table.group(), re.MULTILINE)) if table else frozenset()

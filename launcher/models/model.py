"""Model folders: the built-in demo model, a local one or one of the hub, and what their config.json decides:
whether they can be served, and whether a draft model has the base model's vocabulary.

Opens no weights, so that a model is rejected within a second, before its weights are downloaded.
"""

import importlib.util
import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lorikeet.adapters import refs
from lorikeet.launcher.config.settings import Settings
from lorikeet.launcher.exits import Exit, LauncherError, refuse
from lorikeet.proto import pooling
from lorikeet.proto.pooling import PooledModel

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN")
"""Variables with the token of the hub: the first one that is set."""

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


def num_positions(config: dict[str, Any], *, is_default: bool = False) -> int | None:
    """Positions that the model was made for, with its rotary scaling; None if the configuration does not say.
    `is_default`: those without longrope's long factors, which change the output of short requests too.
    """
    for values in (config, _text(config)):
        for field in _LENGTH_FIELDS:
            length = values.get(field)
            if isinstance(length, int) and length > 1:
                if is_default and (short := _before_longrope(values)):
                    return min(length, short)
                return max(length, _stretched(values, length)) - pooling.num_reserved_positions(values)
    return None


def _before_longrope(values: dict[str, Any]) -> int | None:
    """Positions up to which longrope uses its short factors; None with other rotary embeddings."""
    scaling = values.get("rope_scaling") or values.get("rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "longrope":
        return None
    original = scaling.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    return original if isinstance(original, int) and original > 1 else None


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


EMBEDDED_ID = "lorikeet/base"
"""The small model of code that is part of the installation."""
DEMO_ID = "lorikeet/smollm2"
"""SmolLM2-135M-Instruct, which is downloaded once: what a server without --model-id serves."""
MAX_DEFAULT_LEN = 4096
"""LoRAX's default for the length of requests, at most."""
_MAX_DEFAULT_CONTEXT = 1 << 18
"""Tokens of a request by default, at most: tables of positions take memory for each."""
_STEP_OF_CHUNKS = 4145
"""Prompt tokens of a step by default, at most, where a prompt may take several steps."""
_MAX_NAMED_FILES = 4
"""Files that an error names."""
_STEP_OF_PROMPTS = 2048
"""Tokens of a step of a model that generates no text: short prompts are computed together."""
_CACHED = "models--"
"""How huggingface-hub's cache begins the name of a model's folder."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")
"""Parameters of generation_config.json that requests have too."""
_FILES = (".gguf", ".safetensors")
"""Endings of a file's name, which no repository has."""


@dataclass(frozen=True)
class ModelFolder:
    """A model on this machine."""

    id: str
    """The name that the operator gave."""
    path: Path
    sha: str | None = None
    """Its commit, for a model of the hub."""
    is_local: bool = False
    """Whether `id` is a path."""
    family: Path | None = None
    """Folder of the adapters that belong to a demo model, with their catalogues."""

    @property
    def name(self) -> str:
        """The model's name in requests and answers: that of the folder or file, if the operator gave a path."""
        return name_of(self.id) if self.is_local else self.id


def name_of(path: str) -> str:
    """The name of a model at a path; in huggingface-hub's cache that of the repository."""
    absolute = Path(os.path.abspath(path))
    repository = absolute.parent.parent.name
    if absolute.parent.name == "snapshots" and repository.startswith(_CACHED):
        return repository.removeprefix(_CACHED).replace("--", "/")
    return absolute.name


_DEMO = Path(__file__).parents[2] / "demo"
DEMO_FAMILY = _DEMO / "smollm2"
"""Folder of the demo's adapters, with their catalogue."""


def embedded() -> ModelFolder:
    """The model of code that is part of the installation."""
    path = _DEMO / "base"
    if (path / "config.json").is_file():
        return ModelFolder(EMBEDDED_ID, path, family=_DEMO)
    raise LauncherError(Exit.DOWNLOAD_ERROR, f"this installation lacks {EMBEDDED_ID}: give --model-id")


@dataclass(frozen=True)
class DemoModel:
    """The demo's model, which may have to be downloaded."""

    is_default: bool
    """Whether no model was given: without network, the embedded model replaces it."""


@dataclass(frozen=True)
class GgufModel:
    """A model in a single file, for which a folder has to be made."""

    id: str
    """The path that the operator gave."""


def named(settings: Settings) -> refs.Ref | ModelFolder | GgufModel | DemoModel:
    """The base model of the settings: a demo model, a local folder or file, or a reference to the hub."""
    text = settings["model-id"]
    embeds = settings["pooling"] is not None or settings["embedding-dim"] is not None
    if text in (EMBEDDED_ID, DEMO_ID) and settings["revision"] is not None:
        refuse(f"--revision needs another model: {text} has no revisions")
    if text == EMBEDDED_ID or (text is None and embeds):  # the demo's model has no adapter that embeds
        return embedded()
    if text is None or text == DEMO_ID:
        return DemoModel(is_default=text is None)
    return found("model-id", text, settings["revision"])


def found(flag: str, text: str, revision: str | None) -> refs.Ref | ModelFolder | GgufModel:
    """The model that the flag names; `revision` is the value of the flag for its revision."""
    if Path(text).is_dir():
        return folder(text)
    if Path(text).is_file() and text.endswith(".gguf"):
        return GgufModel(text)
    if Path(text).is_file():
        raise LauncherError(
            Exit.DOWNLOAD_ERROR, f"--{flag} {text} is a file: give a model's folder, a .gguf file, or a hub id"
        )
    if _is_path(text):
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"the folder {text} does not exist (--{flag})")
    try:
        ref = refs.parse(text)
    except ValueError as error:
        raise LauncherError(Exit.ARGUMENT_VALIDATION, f"--{flag}: {error}") from None
    return refs.Ref(ref.source, ref.id, ref.revision or revision)


def _is_path(text: str) -> bool:
    """Whether this can only be meant as a path: a hub id is `name` or `owner/name`."""
    parts = text.partition("@")[0].split("/")  # a revision may have slashes
    return text.startswith((".", "~")) or (len(parts) > 1 and "" in parts) or len(parts) > 2 or text.endswith(_FILES)


def folder(text: str) -> ModelFolder:
    """The model in a local folder."""
    path = Path(text).resolve()
    if not (path / "config.json").is_file() and (path / "adapter_config.json").is_file():
        raise LauncherError(
            Exit.DOWNLOAD_ERROR,
            f"{text} is an adapter, not a model: give its base as --model-id, and it as adapter_id in requests",
        )
    if not (path / "config.json").is_file():
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"{text} has no config.json: it is not a model's folder{_files(path)}")
    return ModelFolder(text, path, is_local=True)


def _files(path: Path) -> str:
    """The models among the files of a folder, for an error; empty without any."""
    names = sorted(file.name for file in path.glob("*.gguf"))
    if not names:
        return ""
    more = f" (and {len(names) - _MAX_NAMED_FILES} more)" if len(names) > _MAX_NAMED_FILES else ""
    return f". Give one of its .gguf files: {', '.join(str(path / name) for name in names[:_MAX_NAMED_FILES])}{more}"


def has_chat_template(path: Path) -> bool:
    """Whether the model in a folder is made for conversations."""
    if (path / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((path / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def recommended_sampling(path: Path) -> dict[str, float]:
    """The sampling parameters that the model's generation_config.json names. They are not applied."""
    try:
        values = json.loads((path / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: values[name] for name in _SAMPLING if type(values.get(name)) in (int, float)}


def configuration(path: Path) -> dict[str, Any]:
    """The model's config.json."""
    try:
        values = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"{path / 'config.json'} is not an object")
    return values


def read_pooling(settings: Settings, folder: ModelFolder, config: dict[str, Any]) -> PooledModel | None:
    """How the base model's prompts become vectors or labels; None if it generates text. Raises LauncherError."""
    try:
        return pooling.read(folder.path, config, settings["pooling"] or "", settings["embedding-dim"])
    except (ValueError, OSError) as reason:
        refuse(f"{folder.id} cannot be served: {reason}")


def with_lengths(
    settings: Settings, config: dict[str, Any], pooled: PooledModel | None = None, draft: dict[str, Any] | None = None
) -> Settings:
    """The settings with defaults for lengths that were not given; without output a prompt may have them all. `draft`:
    the config.json of the draft model.
    """
    if pooled is not None:
        return _with_prompt_lengths(settings, config, pooled)
    total = settings["max-total-tokens"] or _context(settings, config, draft)
    longest = settings["max-input-length"] or total - 1
    step = longest + 50
    if settings["max-total-tokens"] is None and settings["chunked-prefill"]:
        step = min(step, _STEP_OF_CHUNKS)
    step = settings["max-batch-prefill-tokens"] or step
    return settings.with_values(max_total_tokens=total, max_input_length=longest, max_batch_prefill_tokens=step)


def _context(settings: Settings, config: dict[str, Any], draft: dict[str, Any] | None) -> int:
    """Tokens of a request, prompt and output, that the models are made for; the shard may have memory for fewer."""
    models = [config] if draft is None else [config, draft]
    lengths = [num_positions(model, is_default=True) or MAX_DEFAULT_LEN for model in models]
    return min(*lengths, settings["max-batch-total-tokens"] or _MAX_DEFAULT_CONTEXT, _MAX_DEFAULT_CONTEXT)


def _with_prompt_lengths(settings: Settings, config: dict[str, Any], pooled: PooledModel) -> Settings:
    positions = num_positions(config) or MAX_DEFAULT_LEN
    default = positions if pooled.is_encoder else min(positions, MAX_DEFAULT_LEN)
    total = settings["max-total-tokens"] or min(default, pooled.max_length or default)
    longest = settings["max-input-length"] or total
    step = settings["max-batch-prefill-tokens"] or max(longest, _STEP_OF_PROMPTS)
    return settings.with_values(max_total_tokens=total, max_input_length=longest, max_batch_prefill_tokens=step)


def with_weights_of(override: Path, model: Path, into: Path) -> Path:
    """A folder `into` with links to the weight files of `override` and the other files of `model`."""
    weights = [path for path in sorted(override.iterdir()) if is_weights(path.name)]
    if not weights:
        raise LauncherError(Exit.DOWNLOAD_ERROR, f"--weights-cache-override {override} holds no weight files")
    into.mkdir(mode=0o700)
    small = [path for path in sorted(model.iterdir()) if path.is_file() and not is_weights(path.name)]
    for path in (*small, *weights):
        os.symlink(path.resolve(), into / path.name)
    return into


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights or lists the files that do."""
    return name.removesuffix(".index.json").endswith((".safetensors", ".bin"))


_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Vocabularies of tokenizers without tokenizer.json; files of the same name are compared byte by byte."""


def check(base: ModelFolder, draft: ModelFolder, tokenizer: ModelFolder | None = None) -> None:
    """Raise LauncherError that names both models if `draft` cannot propose tokens for `base`.

    `tokenizer` is the model that --draft-tokenizer-id names; the draft model's own files are compared too.
    """
    cannot = f"{draft.id} cannot be a draft model for {base.id}"
    if tokenizer is None or any((draft.path / name).exists() for name in (_FILE, *_OTHER_FILES)):
        _compare(base.path, draft.path, f"{cannot}: its tokenizer")
    if tokenizer is not None:
        _compare(base.path, tokenizer.path, f"{cannot}: its tokenizer {tokenizer.id}")
    ours, theirs = (_size(configuration(model.path)) for model in (base, draft))
    if ours is not None and theirs is not None and ours != theirs:
        _check_padding(base.path, (tokenizer or draft).path, f"{cannot}: it has {theirs} token ids, the base {ours}")


def _compare(base: Path, other: Path, whose: str) -> None:
    """Ids that only one of them has are accepted: the other never produces them."""
    if _same(base, other, _FILE):
        return
    ours, theirs = _tokens(base / _FILE), _tokens(other / _FILE)
    if ours is None or theirs is None:
        if not any(_same(base, other, name) for name in _OTHER_FILES):
            refuse(f"{whose} differs, or cannot be compared")
        return
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            refuse(f"{whose} differs: token {number} is {theirs[number]!r}, in the base model {ours[number]!r}")


def _check_padding(base: Path, other: Path, sentence: str) -> None:
    """Output heads of different sizes are accepted if the tokenizers have the same ids: the rest is padding."""
    ours, theirs = _tokens(base / _FILE), _tokens(other / _FILE)
    if None not in (ours, theirs) and ours != theirs:
        refuse(sentence)


def _size(config: dict[str, Any]) -> int | None:
    for values in (config, config.get("text_config") or {}):
        if isinstance(values, dict) and isinstance(values.get("vocab_size"), int):
            return int(values["vocab_size"])
    return None


def _same(ours: Path, theirs: Path, name: str) -> bool:
    try:
        return (ours / name).read_bytes() == (theirs / name).read_bytes()
    except OSError:
        return False


def _tokens(path: Path) -> dict[int, str] | None:
    """The texts of all ids in a tokenizer.json; None if there is none."""
    try:
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {int(number): str(text) for text, number in vocabulary.items()}
        else:  # unigrams with their scores
            tokens = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
        return tokens | {int(added["id"]): str(added["content"]) for added in content.get("added_tokens") or []}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        refuse(f"{path} cannot be read: {error}")

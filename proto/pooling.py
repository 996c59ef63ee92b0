"""Whether a model computes vectors or labels instead of text, and how: from its config.json, the configuration files of
sentence-transformers next to it, and `--pooling`. Imports no library that would load the model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POOLINGS = ("cls", "mean", "last")
"""Which hidden states make the vector: of the first token, the mean of all, of the last token."""
EMBED, CLASSIFY, TOKEN_CLASSIFY = "embed", "classify", "token-classify"
ENCODERS = frozenset(
    {
        "albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert", "modernbert",
        "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
    }
)  # fmt: skip
"""Values of `model_type` in which every token sees the whole prompt, unless `is_decoder` is set."""
_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
)
MODULES = "modules.json"
DENSE = "2_Dense_{}"
"""Folder of the projection to so many dimensions, in embedders that have several (stella)."""
_CLASSES = {"ForSequenceClassification": CLASSIFY, "ForTokenClassification": TOKEN_CLASSIFY}
_IDENTITY, _SIGMOID = "Identity", "Sigmoid"
_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_FLAG_PREFIX = "pooling_mode_"
_SERVED_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True)
class PooledModel:
    """How a prompt becomes a vector or scores."""

    task: str
    """EMBED, CLASSIFY or TOKEN_CLASSIFY."""
    pooling: str
    """One of POOLINGS; CLASSIFY: chosen by the model's code. Without meaning for TOKEN_CLASSIFY."""
    is_encoder: bool
    """Whether every token sees the whole prompt."""
    steps: tuple[str, ...] = ()
    """What follows the pooling: folders of Dense modules of sentence-transformers, and NORMALIZE."""
    max_length: int | None = None
    """Tokens of a prompt, if sentence-transformers limits them further than the positions."""
    lowercase: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    """sentence-transformers' prompts, by name: texts that are put before an input."""
    default_prompt: str = ""
    """The text that is put before an input if the request names none."""

    @property
    def is_whole(self) -> bool:
        """Whether a prompt has to be computed in one step, and no part of it can come from the prefix cache."""
        return self.is_encoder or self.pooling != "last" or self.task == TOKEN_CLASSIFY


NORMALIZE = "normalize"


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether every token of the model of this config.json sees the whole prompt."""
    return config.get("model_type") in ENCODERS and not config.get("is_decoder")


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the model of this config.json generates no text, whatever other files say."""
    return is_encoder(config) or _architecture(config).endswith(tuple(_CLASSES))


def num_reserved_positions(config: Mapping[str, Any]) -> int:
    """Positions of `max_position_embeddings` that no token has: RoBERTa's begin after the padding token's number."""
    if config.get("model_type") not in _AFTER_PADDING or config.get("is_decoder"):
        return 0
    padding = config.get("pad_token_id", 1)
    return padding + 1 if isinstance(padding, int) else 0


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def read(
    folder: Path, config: Mapping[str, Any], pooling: str = "", dimensions: int | None = None
) -> PooledModel | None:
    """Reads how the model in `folder` with this config.json pools; None for one that generates text.

    `pooling` and `dimensions` are `--pooling` and `--embedding-dim`, "" and None without. Raises ValueError for files
    that ask for something that is not served, and OSError.
    """
    architecture, encodes = _architecture(config), is_encoder(config)
    for ending, task in _CLASSES.items():
        if architecture.endswith(ending):
            _refuse_flags(pooling, dimensions, f"{architecture} classifies")
            return PooledModel(task, _pooling_of_classifier(config, encodes), encodes)
    modules = _modules(folder)
    if not (modules or encodes or pooling or dimensions):
        return None
    model = _with_modules(folder, modules, encodes)
    if pooling:
        model = _replaced(model, pooling=pooling)
    if dimensions is not None and (folder / DENSE.format(dimensions)).is_dir():
        kept = tuple(step for step in model.steps if step == NORMALIZE)
        model = _replaced(model, steps=(DENSE.format(dimensions), *kept))
    return model


def num_labels(config: Mapping[str, Any]) -> int:
    """Labels of a classification model; two is transformers' default."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else int(config.get("num_labels") or 2)


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """The names of a classification model's labels, in the order of their scores."""
    names = config.get("id2label") or {}
    return [str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels(config))]


def activation(config: Mapping[str, Any]) -> str:
    """What turns a classification model's logits into scores: sigmoid, softmax or none, as in transformers'
    pipelines and in sentence-transformers' CrossEncoder. Raises ValueError for other functions.
    """
    settings = config.get("sentence_transformers")
    name = str(settings.get("activation_fn") or "") if isinstance(settings, dict) else ""
    name = name or str(config.get("sbert_ce_default_activation_function") or "")
    kind = name.rpartition(".")[2]
    if kind and kind not in (_IDENTITY, _SIGMOID):
        raise ValueError(f"its activation function {name} is not served, only Identity and Sigmoid")
    if kind:
        return "none" if kind == _IDENTITY else "sigmoid"
    if num_labels(config) == 1 or config.get("problem_type") == "multi_label_classification":
        return "sigmoid"
    return "none" if config.get("problem_type") == "regression" else "softmax"


def _pooling_of_classifier(config: Mapping[str, Any], encodes: bool) -> str:
    return str(config.get("classifier_pooling") or "cls") if encodes else "last"


def _refuse_flags(pooling: str, dimensions: int | None, reason: str) -> None:
    flag = "--pooling" if pooling else "--embedding-dim" if dimensions is not None else ""
    if flag:
        raise ValueError(f"{flag} is of embedding models, and {reason}")


def _replaced(model: PooledModel, **values: Any) -> PooledModel:
    return PooledModel(**{**vars(model), **values})


def _modules(folder: Path) -> list[dict[str, Any]]:
    """sentence-transformers' modules; none without its files, or if they are of a cross-encoder."""
    modules = _read_json(folder / MODULES)
    return [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.is_file() else None


def _with_modules(folder: Path, modules: list[dict[str, Any]], encodes: bool) -> PooledModel:
    pooling, steps = "mean", list[str]()
    with_prompt = True
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        path = str(module.get("path", ""))
        if kind not in _SERVED_MODULES:
            raise ValueError(
                f"its sentence-transformers module {kind} is not served, only {', '.join(_SERVED_MODULES)}"
            )
        if ".." in path or path.startswith("/"):
            raise ValueError(f"the path {path} in its {MODULES} is outside of its folder")
        if kind == "Pooling":
            pooling_settings = _read_json(folder / path / "config.json") or {}
            pooling, with_prompt = _pooling(pooling_settings), pooling_settings.get("include_prompt") is not False
        elif kind == "Dense":
            steps.append(path)
        elif kind == "Normalize":
            steps.append(NORMALIZE)
    settings = _read_json(folder / "sentence_bert_config.json") or {}
    texts = _read_json(folder / "config_sentence_transformers.json") or {}
    prompts = {str(name): str(text) for name, text in (texts.get("prompts") or {}).items() if text}
    default_prompt = prompts.get(str(texts.get("default_prompt_name")), "")
    if not with_prompt and default_prompt:
        raise ValueError("pooling without the tokens of the prompt (include_prompt) is not served")
    length = settings.get("max_seq_length")
    return PooledModel(
        EMBED,
        pooling,
        encodes,
        tuple(steps),
        length if isinstance(length, int) else None,
        bool(settings.get("do_lower_case")),
        tuple(sorted(prompts.items())) if with_prompt else (),
        default_prompt,
    )


def _pooling(settings: Mapping[str, Any]) -> str:
    """The pooling that a Pooling module's configuration chooses, in either of its two forms. Raises ValueError."""
    named = settings.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else named if isinstance(named, list) else None
    if chosen is None:
        flags = [name for name, value in settings.items() if name.startswith(_FLAG_PREFIX) and value is True]
        chosen = [_FLAGS.get(name, name.removeprefix(_FLAG_PREFIX)) for name in flags]
    chosen = ["last" if name == "lasttoken" else name for name in chosen]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise ValueError(
            f"pooling by {' and '.join(map(str, chosen)) or 'nothing'} is not served, only {', '.join(POOLINGS)}"
        )
    return str(chosen[0])

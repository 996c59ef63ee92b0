"""Readers of the bodies of the routes to embedding and classification models.

Each dialect has its own names: OpenAI's and vLLM's bodies have their fields at the top level, LoRAX's have
`parameters`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import TooManyTokens, UnsupportedField, ValidationError
from lorikeet.router.schemas.adapters import AdapterFields, merge_child, read_merge
from lorikeet.router.schemas.field_table import Route, check_unread
from lorikeet.router.schemas.fields import Fields, are_token_ids
from lorikeet.router.schemas.openai import read_adapter
from lorikeet.router.text.encoding import Cut
from lorikeet.router.text.length import TokenLength

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI."""
FORMATS = ("float", "base64")

Text = str | list[int]
"""A text, or its token ids."""


@dataclass(frozen=True)
class PooledFields:
    """What the bodies of all routes have in common."""

    adapter: AdapterFields
    cut: Cut
    priority: int
    ignored: list[str]


@dataclass(frozen=True)
class EmbeddingsRequest:
    """The body of `/v1/embeddings`."""

    common: PooledFields
    texts: list[Text]
    encoding_format: str
    dimensions: int | None
    prompt_name: str | None = None
    use_activation: bool = True
    """Whether logits become scores."""


@dataclass(frozen=True)
class PairsRequest:
    """The body of `/score` and `/rerank`: texts that are compared pair by pair."""

    common: PooledFields
    first: list[str]
    second: list[str]
    use_activation: bool
    top_n: int | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """One text with each of the others, or both lists side by side."""
        first = self.first * len(self.second) if len(self.first) == 1 else self.first
        return list(zip(first, self.second, strict=True))


def read_embeddings(body: dict[str, Any], config: RouterConfig, *, needs_model: bool = False) -> EmbeddingsRequest:
    """Type and check; also the bodies of `/pooling` and of vLLM's `/classify`. Raises WrongJsonType or
    ValidationError.
    """
    fields = Fields(body)
    model = fields.text("model")
    if model is None and needs_model:
        raise ValidationError("you must provide a model parameter", "model")
    texts = read_texts(fields, "input", config)
    encoding_format = fields.text("encoding_format") or "float"
    if encoding_format not in FORMATS:
        raise ValidationError(f"`encoding_format` must be {' or '.join(FORMATS)}", "encoding_format")
    dimensions = read_dimensions(fields)
    prompt_name, activation = fields.text("prompt_name"), _activation(fields)
    common = _common(fields, config, model or "")
    return EmbeddingsRequest(common, texts, encoding_format, dimensions, prompt_name, activation)


def read_score(body: dict[str, Any], config: RouterConfig) -> PairsRequest:
    """The body of `/score`, under vLLM's older or newer names. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    names = next((names for names in _PAIR_NAMES if any(map(fields.has, names))), _PAIR_NAMES[0])
    first, second = (_pair_texts(fields.take(name), name) for name in names)
    if len(first) not in (1, len(second)):
        raise ValidationError(
            f"`{names[0]}` must be one text, or as many as `{names[1]}`. Given: {len(first)} and {len(second)}",
            names[0],
        )
    activation = _activation(fields)
    return PairsRequest(_common(fields, config, fields.text("model") or ""), first, second, activation)


def read_rerank(body: dict[str, Any], config: RouterConfig) -> PairsRequest:
    """The body of `/rerank`, as Jina's and Cohere's. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    query, documents = fields.required_text("query"), _pair_texts(fields.take("documents"), "documents")
    top_n = fields.integer("top_n", "u32")
    fields.optional_flag("return_documents")
    activation = _activation(fields)
    common = _common(fields, config, fields.text("model") or "")
    return PairsRequest(common, [_checked(query, "query")], documents, activation, top_n)


_PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


def _pair_texts(value: Any, name: str) -> list[str]:
    """A text, texts, or objects with a `text`."""
    items = value if isinstance(value, list) else [value]
    given = [item.get("text") if isinstance(item, dict) else item for item in items]
    texts = [_checked(text, name) for text in given if isinstance(text, str)]
    if not texts or len(texts) < len(given):
        raise ValidationError(f"`{name}` must be a string or strings", name)
    check_num_texts(len(texts), name)
    return texts


def _activation(fields: Fields) -> bool:
    """vLLM's `use_activation` and its older names; true by default."""
    given = [fields.optional_flag(name) for name in ("use_activation", "activation", "softmax")]
    return next((flag for flag in given if flag is not None), True)


def read_dimensions(fields: Fields) -> int | None:
    """`dimensions`, which must not be zero."""
    dimensions = fields.integer("dimensions", "u32")
    if dimensions == 0:
        raise ValidationError("`dimensions` must be strictly positive", "dimensions")
    return dimensions


def _common(fields: Fields, config: RouterConfig, model: str) -> PooledFields:
    """Common fields of a body that has them at the top level; all of its own fields are read."""
    adapter = read_adapter(fields, config, model)
    cut = read_cut(fields, config)
    priority = fields.integer("priority", "i32") or 0
    check_unread(fields, Route.EMBEDDINGS)
    return PooledFields(adapter, cut, priority, fields.ignored())


def read_cut(fields: Fields, config: RouterConfig) -> Cut:
    """How texts are tokenized: vLLM's fields, and `truncate` of text-embeddings-inference."""
    special = fields.optional_flag("add_special_tokens")
    most = fields.integer("truncate_prompt_tokens", "i32")
    if most is not None and not (most == -1 or 0 < most <= config.max_input_length):
        rule = f"must be strictly positive and <= {config.max_input_length}, or -1"
        raise ValidationError(f"`truncate_prompt_tokens` {rule}. Given: {most}", "truncate_prompt_tokens")
    if most == -1 or (fields.flag("truncate") and most is None):
        most = config.max_input_length
    side = fields.text("truncation_side") or "right"
    if side not in ("left", "right"):
        raise ValidationError("`truncation_side` must be left or right", "truncation_side")
    return Cut(most, side, special is not False)


def read_texts(fields: Fields, name: str, config: RouterConfig) -> list[Text]:
    """A text, texts, token ids, or lists of token ids: always as a list. Raises ValidationError."""
    value = fields.take(name)
    if value is None:
        raise ValidationError(f"`{name}` is required", name)
    if isinstance(value, str):
        return [_checked(value, name)]
    if isinstance(value, list) and value:
        if are_token_ids(value):
            return [value]
        check_num_texts(len(value), name)
        if all(isinstance(item, str) for item in value):
            return [_checked(item, name) for item in value]
        if all(isinstance(item, list) and item and are_token_ids(item) for item in value):
            return value
    raise ValidationError(
        f"`{name}` must be a string, strings, token ids, or lists of token ids, none of them empty", name
    )


def check_num_texts(num_texts: int, name: str) -> None:
    """Raises ValidationError."""
    if num_texts > MAX_INPUTS:
        raise ValidationError(f"`{name}` may have {MAX_INPUTS} texts. Given: {num_texts}", name)


def _checked(text: str, name: str) -> str:
    if not text:
        raise ValidationError(f"`{name}` cannot be an empty string", name)
    return text


def check_text_length(text: str, length: TokenLength, config: RouterConfig, name: str) -> None:
    """Raises TooManyTokens for a text that must have too many tokens, before it is tokenized."""
    least = length.least_tokens([text], config.max_input_length)
    if least > config.max_input_length:
        raise _too_long(f"at least {least}", config, name)


def check_num_tokens(ids: Sequence[int], config: RouterConfig, name: str) -> None:
    """Raises TooManyTokens."""
    if len(ids) > config.max_input_length:
        raise _too_long(str(len(ids)), config, name)


def _too_long(given: str, config: RouterConfig, name: str) -> TooManyTokens:
    return TooManyTokens(
        f"`{name}` may have {config.max_input_length} tokens per text. Given: {given}. "
        "Set `truncate_prompt_tokens` to -1 to keep the first ones",
        name,
    )


@dataclass(frozen=True)
class LoraxRequest:
    """The body of `/embed`, `/classify` and `/classify_batch`."""

    inputs: list[str]
    common: PooledFields


def read_lorax(body: dict[str, Any], config: RouterConfig, *, is_batch: bool = False) -> LoraxRequest:
    """`inputs` is one text, or with `is_batch` a list of texts. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    if is_batch:
        inputs = fields.texts("inputs")
        check_num_texts(len(inputs), "inputs")
    else:
        inputs = [fields.required_text("inputs")]
    if not inputs or not all(inputs):
        raise ValidationError("`inputs` cannot be empty", "inputs")
    child = fields.child("parameters")
    name, source, token = child.text("adapter_id"), child.text("adapter_source"), child.text("api_token")
    merge = read_merge(merge_child(child), name)
    truncate = child.take("truncate")
    if truncate is not None and (isinstance(truncate, bool) or not isinstance(truncate, int)):
        raise UnsupportedField("truncate", "must be a number of tokens")
    if truncate is not None and not 0 < truncate <= config.max_input_length:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {config.max_input_length}. Given: {truncate}",
            "truncate",
        )
    common = PooledFields(AdapterFields(name, source, token, merge), Cut(truncate), 0, fields.ignored())
    return LoraxRequest(inputs, common)

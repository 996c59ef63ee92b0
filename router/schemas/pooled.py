"""The bodies of the routes to embedding and classification models.

Each dialect has its own names: OpenAI's and vLLM's bodies have their fields at the top level, LoRAX's have
`parameters`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, RootModel

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import TooManyTokens, UnsupportedField, ValidationError
from lorikeet.router.schemas.adapters import AdapterFields, AdapterGroup
from lorikeet.router.schemas.model import (
    I32,
    U32,
    Body,
    DialectBody,
    Missing,
    Rejected,
    Rule,
    Texts,
    are_token_ids,
    fail_fast,
    published_as,
)
from lorikeet.router.text.tokenizer import Cut, TokenLength

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI."""

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
class Embeddings:
    """What is computed for a text, or for each of several."""

    common: PooledFields
    texts: list[Text]
    encoding_format: str
    dimensions: int | None
    prompt_name: str | None = None
    use_activation: bool = True
    """Whether logits become scores."""


@dataclass(frozen=True)
class Pairs:
    """Texts that are compared pair by pair."""

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


@dataclass(frozen=True)
class LoraxTexts:
    """The texts of a body of LoRAX's."""

    inputs: list[str]
    common: PooledFields


# `read_texts` and `_pair_texts` check the values of these types.
_TextsOrIds = Annotated[Any, published_as(str | list[str] | list[int] | list[list[int]])]
_TextOrTexts = Annotated[Any, published_as(str | list[str])]


class PooledGroup(AdapterGroup):
    """Fields of all routes to embedding and classification models but LoRAX's and Cohere's."""

    model: str | None = Field(None, description="The base model, an adapter or an alias")
    add_special_tokens: bool = True
    truncate_prompt_tokens: I32 | None = Field(None, description="Keeps so many; -1: as many as a text may have")
    truncation_side: Literal["left", "right"] = Field("right", description="Where tokens are removed")
    truncate: bool = Field(False, description="The same as `truncate_prompt_tokens` -1")
    priority: I32 = 0
    user: str | None = None
    use_activation: bool | None = Field(
        None, description="False gives logits instead of scores; not for embedding models"
    )
    activation: bool | None = Field(None, description="The same as `use_activation`")
    softmax: bool | None = Field(None, description="The same as `use_activation`")

    messages = chat_template = Rejected("is not supported by this route: use `input`")
    input_type = Rejected("is not supported by this server: use `prompt_name`")
    output_dtype = embed_dtype = Rejected("is not supported by this server: values are float32", ("float", "float32"))
    normalize = Rejected("is not supported by this server: the model's files decide", (True,))

    def common(self, config: RouterConfig) -> PooledFields:
        """What all bodies have in common, once their own fields are checked. Raises ValidationError."""
        adapter = self.adapter_or(self.model or "", config.model_names, self.user)
        most = self.truncate_prompt_tokens
        if most is not None and not (most == -1 or 0 < most <= config.max_input_length):
            rule = f"must be strictly positive and <= {config.max_input_length}, or -1"
            raise ValidationError(f"`truncate_prompt_tokens` {rule}. Given: {most}", "truncate_prompt_tokens")
        if most == -1 or (self.truncate and most is None):
            most = config.max_input_length
        self.check_supported()
        cut = Cut(most, self.truncation_side, self.add_special_tokens)
        return PooledFields(adapter, cut, self.priority, self.ignored())

    @property
    def is_activated(self) -> bool:
        """Whether logits become scores."""
        flags = (self.use_activation, self.activation, self.softmax)
        return next((flag for flag in flags if flag is not None), True)


class InputGroup(PooledGroup):
    """A text, texts, or their token ids."""

    input: _TextsOrIds = Field(None, description="A text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: U32 | None = Field(None, gt=0, description="The first ones of each vector, which has length one again")
    prompt_name: str | None = Field(None, description="One of the model's prompts for sentence-transformers")

    def to_request(self, config: RouterConfig) -> Embeddings:
        """Raises ValidationError."""
        texts = read_texts(self.input, "input")
        common = self.common(config)
        return Embeddings(common, texts, self.encoding_format, self.dimensions, self.prompt_name, self.is_activated)


class EmbeddingsRequest(InputGroup):
    """The body of `/v1/embeddings`."""

    model: Annotated[str, Missing("you must provide a model parameter")] = Field(
        description="The base model, an adapter or an alias"
    )


class PoolingRequest(InputGroup):
    """The body of `/pooling`."""

    task: Annotated[Any, published_as(str)] = Field(
        None, description="The model's; or token_embed, token_classify: a result for every token"
    )


class ScoreRequest(PooledGroup):
    """The body of `/score`, under vLLM's older or newer names."""

    text_1: _TextOrTexts = Field(None, description="A text that is compared with each of `text_2`, or as many")
    text_2: _TextOrTexts = None
    queries: _TextOrTexts = Field(None, description="The same as `text_1`; with `documents`")
    documents: _TextOrTexts = None
    data_1: _TextOrTexts = Field(None, description="The same as `text_1`; with `data_2`")
    data_2: _TextOrTexts = None

    def to_request(self, config: RouterConfig) -> Pairs:
        """Raises ValidationError."""
        fields = self.model_fields_set
        names = next((names for names in _PAIR_NAMES if not fields.isdisjoint(names)), _PAIR_NAMES[0])
        first, second = (_pair_texts(getattr(self, name), name) for name in names)
        if len(first) not in (1, len(second)):
            raise ValidationError(
                f"`{names[0]}` must be one text, or as many as `{names[1]}`. Given: {len(first)} and {len(second)}",
                names[0],
            )
        return Pairs(self.common(config), first, second, self.is_activated)


class RerankRequest(PooledGroup):
    """The body of `/rerank`, as Jina's and Cohere's."""

    query: str
    documents: _TextOrTexts = None
    top_n: U32 | None = None
    return_documents: bool = Field(True, description="Answers always have them")

    def to_request(self, config: RouterConfig) -> Pairs:
        """Raises ValidationError."""
        documents = _pair_texts(self.documents, "documents")
        return Pairs(self.common(config), [_checked(self.query, "query")], documents, self.is_activated, self.top_n)


_PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


def _pair_texts(value: Any, name: str) -> list[str]:
    """A text, texts, or objects with a `text`."""
    items = value if isinstance(value, list) else [value]
    written = [item.get("text") if isinstance(item, dict) else item for item in items]
    texts = [_checked(text, name) for text in written if isinstance(text, str)]
    if not texts or len(texts) < len(written):
        raise ValidationError(f"`{name}` must be a string or strings", name)
    check_num_texts(len(texts), name)
    return texts


def read_texts(value: Any, name: str) -> list[Text]:
    """A text, texts, token ids, or lists of token ids: always as a list. Raises ValidationError."""
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


def _too_long(size: str, config: RouterConfig, name: str) -> TooManyTokens:
    return TooManyTokens(
        f"`{name}` may have {config.max_input_length} tokens per text. Given: {size}. "
        "Set `truncate_prompt_tokens` to -1 to keep the first ones",
        name,
    )


class LoraxParameters(AdapterGroup):
    """`parameters` of LoRAX's routes."""

    truncate: Annotated[Any, published_as(int)] = Field(None, description="Keeps only so many tokens of a text")


class LoraxGroup(Body):
    """What LoRAX's routes share."""

    parameters: LoraxParameters = Field(default_factory=lambda: LoraxParameters.read({}))

    def texts(self, inputs: list[str], config: RouterConfig) -> LoraxTexts:
        """Raises ValidationError."""
        if not inputs or not all(inputs):
            raise ValidationError("`inputs` cannot be empty", "inputs")
        adapter, truncate = self.parameters.adapter(), self.parameters.truncate
        if truncate is not None and (isinstance(truncate, bool) or not isinstance(truncate, int)):
            raise UnsupportedField("truncate", "must be a number of tokens")
        if truncate is not None and not 0 < truncate <= config.max_input_length:
            raise ValidationError(
                f"`truncate` must be strictly positive and less than {config.max_input_length}. Given: {truncate}",
                "truncate",
            )
        return LoraxTexts(inputs, PooledFields(adapter, Cut(truncate), 0, self.ignored()))


class EmbedRequest(LoraxGroup):
    """The body of LoRAX's `/embed` and `/classify`."""

    inputs: str

    def to_request(self, config: RouterConfig) -> LoraxTexts:
        """Raises ValidationError."""
        return self.texts([self.inputs], config)


class ClassifyBatchRequest(LoraxGroup):
    """The body of LoRAX's `/classify_batch`."""

    inputs: Texts = Field(default_factory=list)

    def to_request(self, config: RouterConfig) -> LoraxTexts:
        """Raises ValidationError."""
        check_num_texts(len(self.inputs), "inputs")
        return self.texts(self.inputs, config)


class ClassifyRequest(RootModel[EmbedRequest | InputGroup]):
    """The body of `/classify`: LoRAX's with `inputs`, vLLM's with `input`."""


COHERE_NAMES = {
    "input": "texts",
    "dimensions": "output_dimension",
    "truncate_prompt_tokens": "max_tokens",
    "truncation_side": "truncate",
    "prompt_name": "input_type",
    "encoding_format": "embedding_types",
}
"""Fields of `/v1/embeddings`, and what they are called here."""
COHERE_TYPES = ("float", "binary", "ubinary", "base64")
_UNSERVED_TYPES = ("int8", "uint8")
_SIDES = {"START": "left", "END": "right", "NONE": None}
_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""By `input_type`: the names of the prompt that a model may have for it, those of sentence-transformers among them."""


@dataclass(frozen=True)
class CohereEmbed:
    """One request."""

    body: dict[str, Any]
    """The body of `/v1/embeddings`."""
    texts: list[str]
    types: list[str]


class CoherePart(Body):
    """A part of an input."""

    type: Annotated[Any, published_as(Literal["text"])] = None
    text: str = ""


class CohereInput(Body):
    """An input in parts."""

    content: Annotated[list[CoherePart], fail_fast]

    def text(self, where: str) -> str:
        """Raises UnsupportedField."""
        for index, part in enumerate(self.content):
            if part.type != "text":
                raise UnsupportedField(f"{where}.content[{index}]", "must be a text: the model accepts text only")
        return "".join(part.text for part in self.content)


class CohereEmbedRequest(DialectBody):
    """Further fields are those of `/v1/embeddings`."""

    names: ClassVar = COHERE_NAMES

    texts: Texts = Field(default_factory=list)
    inputs: Annotated[list[CohereInput], fail_fast] | None = Field(None, description="In place of `texts`")
    input_type: str | None = Field(None, description="Chooses one of the model's prompts")
    embedding_types: Texts = Field(default_factory=list, description=f"Of {', '.join(COHERE_TYPES)}; default float")
    output_dimension: U32 | None = None
    max_tokens: I32 | None = Field(None, description="Needs `truncate` START or END")
    truncate: Annotated[Literal["START", "END", "NONE"], Rule("must be START, END, NONE")] = "END"
    images = Rejected("is not supported by this server: the model accepts text only", ([], "", False))

    def translated(self, prompts: Mapping[str, str]) -> CohereEmbed:
        """`prompts`: those of the model, by name. Raises ValidationError."""
        self.check_supported()
        texts, types = self._given(), self.embedding_types or ["float"]
        for name in types:
            if name in _UNSERVED_TYPES:
                reason = f"{name} is not supported by this server, only {', '.join(COHERE_TYPES)}"
                raise UnsupportedField("embedding_types", reason)
            if name not in COHERE_TYPES:
                raise ValidationError(f"`embedding_types` must be of {', '.join(COHERE_TYPES)}", "embedding_types")
        most, side = self.max_tokens, _SIDES[self.truncate]
        if side is None and most is not None:
            raise UnsupportedField("max_tokens", "needs `truncate` START or END")
        body: dict[str, Any] = {
            "input": texts,
            "dimensions": self.output_dimension,
            "prompt_name": _prompt_name(self.input_type, prompts),
        }
        if side is not None:
            body |= {"truncate_prompt_tokens": -1 if most is None else most, "truncation_side": side}
        return CohereEmbed(self.with_others(body), texts, list(dict.fromkeys(types)))

    def _given(self) -> list[str]:
        """`texts`, or the texts of `inputs`. Raises ValidationError."""
        texts = self.texts
        if self.inputs is not None:
            texts = [item.text(f"inputs[{index}]") for index, item in enumerate(self.inputs)]
            if self.texts:
                raise ValidationError("`texts` and `inputs` cannot both be given", "texts")
        if not texts or not all(texts):
            raise ValidationError("`texts` must be a list of non-empty strings", "texts")
        return texts


def _prompt_name(input_type: str | None, prompts: Mapping[str, str]) -> str | None:
    """The model's prompt for a type of text, if it has one."""
    if input_type is None:
        return None
    names = _PROMPTS.get(input_type, ())
    prompt = next((name for name in (input_type, *names) if name in prompts), None)
    if prompt is None and not names:
        known = ", ".join(dict.fromkeys((*_PROMPTS, *prompts)))
        raise ValidationError(f"`input_type` must be one of {known}", "input_type")
    return prompt

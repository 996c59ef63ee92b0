"""The body of Cohere's `/v2/embed`, which becomes that of `/v1/embeddings`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.dialects.translated import DialectBody
from lorikeet.router.schemas.model import I32, U32, Body, Rejected, Rule, Texts, fail_fast, published_as

NAMES = {
    "input": "texts",
    "dimensions": "output_dimension",
    "truncate_prompt_tokens": "max_tokens",
    "truncation_side": "truncate",
    "prompt_name": "input_type",
    "encoding_format": "embedding_types",
}
"""Fields of `/v1/embeddings`, and what they are called here."""
TYPES = ("float", "binary", "ubinary", "base64")
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
    """That of `/v1/embeddings`."""
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

    names: ClassVar = NAMES

    texts: Texts = Field(default_factory=list)
    inputs: Annotated[list[CohereInput], fail_fast] | None = Field(None, description="In place of `texts`")
    input_type: str | None = Field(None, description="Chooses one of the model's prompts")
    embedding_types: Texts = Field(default_factory=list, description=f"Of {', '.join(TYPES)}; default float")
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
                reason = f"{name} is not supported by this server, only {', '.join(TYPES)}"
                raise UnsupportedField("embedding_types", reason)
            if name not in TYPES:
                raise ValidationError(f"`embedding_types` must be of {', '.join(TYPES)}", "embedding_types")
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
    found = next((name for name in (input_type, *names) if name in prompts), None)
    if found is None and not names:
        known = ", ".join(dict.fromkeys((*_PROMPTS, *prompts)))
        raise ValidationError(f"`input_type` must be one of {known}", "input_type")
    return found

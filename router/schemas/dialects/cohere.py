"""Reader of the body of Cohere's `/v2/embed`, which becomes that of `/v1/embeddings`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorikeet.router.errors import UnsupportedField, ValidationError
from lorikeet.router.schemas.dialects.translated import items_of, object_of, refuse_others, text_of
from lorikeet.router.schemas.fields import Fields

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


def translate(body: dict[str, Any], prompts: Mapping[str, str]) -> CohereEmbed:
    """`prompts`: those of the model, by name. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    refuse_others(fields, NAMES)
    if fields.take("images"):
        raise UnsupportedField("images", "is not supported by this server: the model accepts text only")
    texts = _texts(fields)
    types = fields.texts("embedding_types") or ["float"]
    for name in types:
        if name in _UNSERVED_TYPES:
            raise UnsupportedField(
                "embedding_types", f"{name} is not supported by this server, only {', '.join(TYPES)}"
            )
        if name not in TYPES:
            raise ValidationError(f"`embedding_types` must be of {', '.join(TYPES)}", "embedding_types")
    cut = fields.text("truncate") or "END"
    if cut not in _SIDES:
        raise ValidationError(f"`truncate` must be {', '.join(_SIDES)}", "truncate")
    most, side = fields.integer("max_tokens", "i32"), _SIDES[cut]
    if side is None and most is not None:
        raise UnsupportedField("max_tokens", "needs `truncate` START or END")
    made: dict[str, Any] = {
        "input": texts,
        "dimensions": fields.integer("output_dimension", "u32"),
        "prompt_name": _prompt_name(fields.text("input_type"), prompts),
    }
    if side is not None:
        made |= {"truncate_prompt_tokens": -1 if most is None else most, "truncation_side": side}
    for name, value in fields.unread():
        made.setdefault(name, value)
    return CohereEmbed(made, texts, list(dict.fromkeys(types)))


def _texts(fields: Fields) -> list[str]:
    """`texts`, or the texts of `inputs`."""
    inputs = fields.take("inputs")
    if inputs is None:
        texts = fields.texts("texts")
    else:
        texts = ["".join(_parts(each, f"inputs[{index}]")) for index, each in enumerate(items_of(inputs, "inputs"))]
        if fields.take("texts"):
            raise ValidationError("`texts` and `inputs` cannot both be given", "texts")
    if not texts or not all(texts):
        raise ValidationError("`texts` must be a list of non-empty strings", "texts")
    return texts


def _parts(value: Any, where: str) -> list[str]:
    """The texts of one input."""
    found = []
    for index, item in enumerate(items_of(object_of(value, where).get("content"), f"{where}.content")):
        name = f"{where}.content[{index}]"
        part = object_of(item, name)
        if part.get("type") != "text":
            raise UnsupportedField(name, "must be a text: the model accepts text only")
        found.append(text_of(part.get("text"), f"{name}.text"))
    return found


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

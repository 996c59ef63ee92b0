"""Pydantic models of the fields that constrain an output: its tokens, its end and its grammar. For the document at
`/openapi.json` only.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field


class Constrained(BaseModel):
    """Fields of every generating route: which tokens the output may have, and what ends it."""

    ignore_eos: bool | None = Field(False, description="End-of-text tokens do not end the output")
    ignore_eos_token: bool | None = Field(False, description="The same as `ignore_eos`")
    min_tokens: int | None = Field(
        0, ge=0, description="Until the output has so many tokens, end-of-text and stop tokens cannot be sampled and "
        "stop strings do not count"
    )  # fmt: skip
    min_new_tokens: int | None = Field(None, ge=0, description="The same as `min_tokens`")
    stop_token_ids: list[int] | None = Field(None, description="Tokens that end the output", max_length=1024)
    include_stop_str_in_output: bool | None = Field(
        None, description="Whether the text includes what ended it; default: stop strings on LoRAX's routes"
    )
    no_stop_trim: bool | None = Field(False, description="True: the same as `include_stop_str_in_output`")
    allowed_token_ids: list[int] | None = Field(None, description="The only tokens of the output", max_length=16384)
    bad_words: list[str] | None = Field(None, description="Words that the output does not contain", max_length=256)
    skip_special_tokens: bool | None = Field(True, description="False shows special tokens in the text")
    spaces_between_special_tokens: bool | None = Field(True, description="Special tokens are never separated by spaces")
    logit_bias: dict[str, float] | None = Field(None, description="By token id, -100 to 100")


class StructuredOutputs(BaseModel):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Grammar(BaseModel):
    type: Literal["json", "json_schema", "regex"]
    value: dict[str, Any] | str


class Structured(BaseModel):
    response_format: dict[str, Any] | None = Field(
        None, description="`type` is text, json_object (with a `schema`, as in LoRAX) or json_schema (as in OpenAI)"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="As in vLLM: one grammar")
    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON schema, or its text")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(None, description="A grammar in Lark's or GBNF's syntax")
    json_schema: dict[str, Any] | str | None = Field(None, description="As in SGLang")
    regex: str | None = Field(None, description="As in SGLang")
    ebnf: str | None = Field(None, description="As in SGLang")
    grammar: Grammar | None = Field(None, description="As in TGI")

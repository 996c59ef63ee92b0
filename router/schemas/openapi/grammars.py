"""Fields that constrain an output to a grammar."""

from typing import Any, Literal

from pydantic import BaseModel, Field


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

"""Readers of bodies of routes that tokenize: LoRAX's and vLLM's `/tokenize`, `/detokenize`, TGI's `/chat_tokenize`."""

from dataclasses import dataclass
from typing import Any

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.adapters import AdapterFields
from lorikeet.router.schemas.chat.messages import Conversation, read_conversation
from lorikeet.router.schemas.chat.tools import NO_TOOLS, ToolFields, read_tools
from lorikeet.router.schemas.fields import Fields, are_token_ids

MAX_DETOKENIZED = 1 << 17
"""Token ids of one request, or as many as a context has."""


@dataclass(frozen=True)
class TokenizeRequest:
    """One of `text` and `conversation` is set."""

    adapter: AdapterFields
    """Whose chat template renders the conversation."""
    field: str
    """The request's field with the text."""
    text: str
    conversation: Conversation | None
    tools: ToolFields
    add_special_tokens: bool
    wants_names: bool
    """vLLM's `return_token_strs`: the tokens' names in the vocabulary."""
    ignored: list[str]


@dataclass(frozen=True)
class DetokenizeRequest:
    """The body of `/detokenize`."""

    token_ids: list[int]
    ignored: list[str]


def read_tokenize(body: dict[str, Any], config: RouterConfig) -> TokenizeRequest:
    """vLLM's body where it has `prompt` or `messages`, else LoRAX's. Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    given = [name for name in ("inputs", "prompt", "messages") if fields.has(name)]
    if len(given) > 1:
        raise ValidationError(f"`{given[0]}` and `{given[1]}` cannot both be set", given[0])
    if given == ["messages"]:
        return read_chat_tokenize(fields, config)
    name = "prompt" if given == ["prompt"] else "inputs"
    text, special = fields.required_text(name), fields.optional_flag("add_special_tokens")
    adapter, wants_names = AdapterFields(), False
    if name == "prompt":
        adapter, wants_names = _adapter(fields), fields.flag("return_token_strs")
    return TokenizeRequest(adapter, name, text, None, NO_TOOLS, special is not False, wants_names, fields.ignored())


def read_chat_tokenize(fields: Fields, config: RouterConfig) -> TokenizeRequest:
    """The body of a chat, as far as it is rendered. Raises WrongJsonType or ValidationError."""
    adapter, wants_names = _adapter(fields), fields.flag("return_token_strs")
    conversation, tools = read_conversation(fields, config), read_tools(fields)
    special = fields.flag("add_special_tokens")
    return TokenizeRequest(adapter, "messages", "", conversation, tools, special, wants_names, fields.ignored())


def read_detokenize(body: dict[str, Any], config: RouterConfig) -> DetokenizeRequest:
    """Raises WrongJsonType or ValidationError."""
    fields = Fields(body)
    fields.expect("model")
    ids, most = fields.take("tokens"), max(MAX_DETOKENIZED, config.max_total_tokens)
    if not isinstance(ids, list) or (ids and not are_token_ids(ids)):
        raise ValidationError("`tokens` must be a list of token ids", "tokens")
    if len(ids) > most:
        raise ValidationError(f"`tokens` supports up to {most} token ids. Given: {len(ids)}", "tokens")
    return DetokenizeRequest(ids, fields.ignored())


def _adapter(fields: Fields) -> AdapterFields:
    """The adapter of `model`, by default the base model or the default adapter."""
    source, token = fields.text("adapter_source"), fields.text("api_token")
    return AdapterFields(fields.text("model") or "", source, token, is_model=True)

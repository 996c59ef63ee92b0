"""The bodies of routes that tokenize: LoRAX's and vLLM's `/tokenize`, `/detokenize`, TGI's `/chat_tokenize`."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, RootModel

from lorikeet.router.config import RouterConfig
from lorikeet.router.errors import ValidationError
from lorikeet.router.schemas.adapters import AdapterFields, AdapterSource
from lorikeet.router.schemas.chat import NO_TOOLS, Conversation, ConversationGroup, ToolFields, ToolGroup
from lorikeet.router.schemas.model import Body, are_token_ids, published_as

MAX_DETOKENIZED = 1 << 17
"""Token ids of one request, or as many as a context has."""

_DEFAULT = AdapterFields()


@dataclass(frozen=True)
class Tokenization:
    """One of `text` and `conversation` is set."""

    field: str
    """The request's field with the text."""
    text: str
    add_special_tokens: bool
    ignored: list[str]
    adapter: AdapterFields = _DEFAULT
    """Whose chat template renders the conversation."""
    conversation: Conversation | None = None
    tools: ToolFields = NO_TOOLS
    wants_names: bool = False
    """vLLM's `return_token_strs`: the tokens' names in the vocabulary."""


class TokenizeRequest(Body):
    """LoRAX's."""

    inputs: str
    add_special_tokens: bool = True

    def to_request(self, config: RouterConfig) -> Tokenization:
        """What is tokenized."""
        return Tokenization("inputs", self.inputs, self.add_special_tokens, self.ignored())


class _ModelGroup(Body):
    """vLLM's fields."""

    model: str = Field("", description="The model whose chat template renders messages; default: as elsewhere")
    adapter_source: AdapterSource | None = None
    api_token: str | None = Field(None, repr=False)
    return_token_strs: bool = False

    @property
    def adapter(self) -> AdapterFields:
        """The adapter of `model`, by default the base model or the default adapter."""
        return AdapterFields(self.model, self.adapter_source, self.api_token, is_model=True)


class TokenizePrompt(_ModelGroup):
    """vLLM's."""

    prompt: str
    add_special_tokens: bool = True

    def to_request(self, config: RouterConfig) -> Tokenization:
        """What is tokenized."""
        special, names = self.add_special_tokens, self.return_token_strs
        return Tokenization("prompt", self.prompt, special, self.ignored(), self.adapter, wants_names=names)


class TokenizeChat(_ModelGroup, ConversationGroup, ToolGroup):
    """vLLM's and TGI's: the body of a chat, as far as it is rendered."""

    add_special_tokens: bool = False

    def to_request(self, config: RouterConfig) -> Tokenization:
        """What is tokenized. Raises ToolError or ValidationError."""
        conversation, tools = self.conversation(config), self.tool_fields()
        special, names = self.add_special_tokens, self.return_token_strs
        return Tokenization("messages", "", special, self.ignored(), self.adapter, conversation, tools, names)


class TokenizeBody(RootModel[TokenizeRequest | TokenizePrompt | TokenizeChat]):
    """LoRAX's body, or one of vLLM's."""


_KINDS: dict[str, type[TokenizeRequest | TokenizePrompt | TokenizeChat]] = {
    "inputs": TokenizeRequest,
    "prompt": TokenizePrompt,
    "messages": TokenizeChat,
}


def read_tokenize(body: dict[str, Any], config: RouterConfig) -> Tokenization:
    """vLLM's body if it has `prompt` or `messages`, else LoRAX's. Raises WrongJsonType or ValidationError."""
    names = [name for name in _KINDS if body.get(name) is not None]
    if len(names) > 1:
        raise ValidationError(f"`{names[0]}` and `{names[1]}` cannot both be set", names[0])
    return _KINDS[names[0] if names else "inputs"].read(body, config).to_request(config)


class DetokenizeRequest(Body):
    """vLLM's."""

    model: Annotated[Any, published_as(str)] = None
    tokens: Annotated[Any, published_as(list[int])] = None

    def token_ids(self, config: RouterConfig) -> list[int]:
        """Raises ValidationError."""
        ids, most = self.tokens, max(MAX_DETOKENIZED, config.max_total_tokens)
        if not isinstance(ids, list) or (ids and not are_token_ids(ids)):
            raise ValidationError("`tokens` must be a list of token ids", "tokens")
        if len(ids) > most:
            raise ValidationError(f"`tokens` supports up to {most} token ids. Given: {len(ids)}", "tokens")
        return ids

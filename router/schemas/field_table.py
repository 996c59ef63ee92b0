"""The table of request fields: which of them each generation route applies, rejects or ignores, and with what values.

The readers in this folder take the fields that work. What they leave unread is looked up here: a field that would
change the text or the answer is rejected with an error that names it, unless its value asks for nothing; every other
one is ignored and named in `x-ignored-fields`. docs/fields.md is generated from this table.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lorikeet.router.errors import UnsupportedField
from lorikeet.router.schemas.fields import Fields


class Route(enum.Flag):
    """The bodies that share a schema: NATIVE is `parameters` of LoRAX's routes."""

    CHAT = enum.auto()
    COMPLETIONS = enum.auto()
    NATIVE = enum.auto()
    EMBEDDINGS = enum.auto()
    """Bodies of all routes to embedding and classification models but LoRAX's."""


CHAT, COMPLETIONS, NATIVE, EMBEDDINGS = Route
OPENAI = CHAT | COMPLETIONS
ALL = OPENAI | NATIVE


class Behaviour(enum.StrEnum):
    """What happens to a field that is set."""

    APPLIED = "applied"
    REJECTED = "rejected"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Row:
    """One field on the routes that treat it alike."""

    name: str
    """With the path of nested fields, such as `messages[].name`."""
    routes: Route
    behaviour: Behaviour
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing, in addition to null."""
    note: str = ""
    """End of the error that starts with a rejected field's name; for other fields, the documentation's remark."""
    in_lorax: bool = False
    """Whether LoRAX applies the field, so that it is rejected with `--unknown-fields ignore` too."""

    def asks(self, value: Any) -> bool:
        """Whether the value asks for something. True and 1 are different values, 1 and 1.0 are the same one."""
        return value is not None and not any(_is_same(value, neutral) for neutral in self.neutral)

    def error(self, name: str) -> UnsupportedField:
        """`name` is that of the field in the request."""
        return UnsupportedField(name, self.note) if self.note else UnsupportedField(name)


def _is_same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _applied(routes: Route, *names: str, note: str = "") -> Iterator[Row]:
    for name in names:
        yield Row(name, routes, Behaviour.APPLIED, note=note)


def _rejected(routes: Route, *names: str, neutral: tuple[Any, ...] = (), note: str = "") -> Iterator[Row]:
    for name in names:
        yield Row(name, routes, Behaviour.REJECTED, neutral, note)


def _ignored(routes: Route, *names: str, note: str = "") -> Iterator[Row]:
    for name in names:
        yield Row(name, routes, Behaviour.IGNORED, note=note)


_EMPTY: tuple[Any, ...] = ("", [], {}, False)
_TEMPLATE = "is applied by /v1/chat/completions, which has a chat template"
_CHAT_ALONE = "is applied by /v1/chat/completions"
_OLDER = "is OpenAI's older form, which this server does not support: use `tools` and `tool_choice`"

ROWS: tuple[Row, ...] = (
    # Adapters
    *_applied(OPENAI, "model", note="the base model, an adapter or an alias; required"),
    *_applied(OPENAI, "adapter_id", note="as in LoRAX; `model` is then the base model or the same name"),
    *_applied(NATIVE, "adapter_id"),
    *_applied(ALL, "adapter_source", "api_token", "merged_adapters", "heads_id"),
    *_applied(
        ALL, *(f"merged_adapters.{name}" for name in
               ("ids", "weights", "merge_strategy", "density", "majority_sign_method")),
    ),
    *_rejected(ALL, "adapter_name", "adapter_parameters", "lora_path", neutral=_EMPTY,
               note="is not supported by this server: use `adapter_id`"),
    # Embedding and classification models
    *_applied(EMBEDDINGS, "model", note="the base model, an adapter or an alias; /v1/embeddings requires it"),
    *_applied(EMBEDDINGS, "adapter_id", "adapter_source", "api_token", "merged_adapters"),
    *_applied(EMBEDDINGS, "input", note="a text, token ids, or a list of either"),
    *_applied(EMBEDDINGS, "encoding_format", note="float or base64"),
    *_applied(EMBEDDINGS, "dimensions", note="the first ones of each vector, which has length one again"),
    *_applied(EMBEDDINGS, "prompt_name", note="one of the model's prompts for sentence-transformers"),
    *_applied(EMBEDDINGS, "use_activation", "activation", "softmax",
              note="false: logits instead of scores; not for embedding models"),
    *_applied(EMBEDDINGS, "task",
              note="of /pooling: the model's; or token_embed, token_classify: a result for every token"),
    *_applied(EMBEDDINGS, "text_1", "text_2", "queries", "data_1", "data_2", note="of /score"),
    *_applied(EMBEDDINGS, "query", "top_n", "return_documents", note="of /rerank"),
    *_applied(EMBEDDINGS, "documents", note="of /rerank and /score"),
    *_applied(EMBEDDINGS, "truncate", note="true is `truncate_prompt_tokens` -1"),
    *_applied(EMBEDDINGS, "truncate_prompt_tokens", note="-1: as many as a text may have"),
    *_applied(EMBEDDINGS, "truncation_side", note="default right: the first tokens are kept"),
    *_applied(EMBEDDINGS, "add_special_tokens", "priority", "user"),
    *_rejected(EMBEDDINGS, "messages", "chat_template", note="is not supported by this route: use `input`"),
    *_rejected(EMBEDDINGS, "input_type", note="is not supported by this server: use `prompt_name`"),
    *_rejected(EMBEDDINGS, "output_dtype", "embed_dtype", neutral=("float", "float32"),
               note="is not supported by this server: values are float32"),
    *_rejected(EMBEDDINGS, "normalize", neutral=(True,),
               note="is not supported by this server: the model's files decide"),
    # Prompts
    *_applied(COMPLETIONS, "prompt", note="a text, token ids, or a list of either"),
    *_applied(COMPLETIONS, "echo"),
    *_rejected(CHAT, "echo", neutral=(False,), note="is applied by /v1/completions"),
    *_rejected(NATIVE, "echo", neutral=(False,), note="is not supported by this route: use `return_full_text`"),
    *_applied(CHAT, "messages", *(f"messages[].{name}" for name in ("role", "content", "name"))),
    *_applied(CHAT, "messages[].content[].type", "messages[].content[].text"),
    *_applied(CHAT, "messages[].tool_calls", note="of the role assistant; arguments are the text of a JSON object"),
    *_applied(CHAT, *(f"messages[].tool_calls[].{name}" for name in
              ("id", "type", "function", "function.name", "function.arguments"))),
    *_applied(CHAT, "messages[].tool_call_id", note="of the role tool"),
    *_applied(CHAT, "messages[].reasoning_content", note="of the role assistant, for chat templates that show it"),
    *_rejected(CHAT, "messages[].function_call", note=_OLDER),
    *_rejected(CHAT, "messages[].audio"),
    *_rejected(CHAT, "messages[].refusal", neutral=("",),
               note="is not supported by this server: put the text into `content`"),
    *_rejected(CHAT, "messages[].reasoning", neutral=("",),
               note="is not supported by this server: use `reasoning_content`"),
    *_rejected(CHAT, "messages[].prefix", neutral=(False,),
               note="is not supported by this server: use `continue_final_message`"),
    *_applied(CHAT, "add_generation_prompt", note="default true; false needs a template that reads it"),
    *_applied(CHAT, "continue_final_message", note="not together with `add_generation_prompt` true"),
    *_applied(CHAT, "chat_template_kwargs",
              note="variables of the chat template; those that it does not read are ignored and named"),
    *_applied(CHAT, "documents", note="rejected (422) if the chat template does not read them"),
    *_applied(CHAT, "chat_template", note="with `--trust-request-chat-template`, else rejected (422)"),
    *_applied(CHAT, "reasoning_effort", "verbosity", note="ignored and named if the chat template does not read it"),
    *_rejected(COMPLETIONS | NATIVE, "add_generation_prompt", neutral=(True,), note=_TEMPLATE),
    *_rejected(COMPLETIONS | NATIVE, "continue_final_message", neutral=(False,), note=_TEMPLATE),
    *_rejected(COMPLETIONS | NATIVE, "chat_template", neutral=("",), note=_TEMPLATE),
    *_rejected(COMPLETIONS | NATIVE, "chat_template_kwargs", neutral=({},), note=_TEMPLATE),
    *_rejected(COMPLETIONS | NATIVE, "documents", neutral=([],), note=_TEMPLATE),
    *_ignored(COMPLETIONS | NATIVE, "reasoning_effort", "verbosity"),
    *_applied(NATIVE, "truncate"),
    *_rejected(OPENAI, "truncate", note="is not supported by this route: use `truncate_prompt_tokens`"),
    *_applied(OPENAI, "truncate_prompt_tokens", note="keeps the last tokens; -1: as many as a prompt may have"),
    *_applied(OPENAI, "truncation_side", note="right keeps the first tokens of a prompt that is not too long"),
    *_rejected(NATIVE, "truncate_prompt_tokens", note="is not supported by this route: use `truncate`"),
    *_rejected(NATIVE, "truncation_side", neutral=("left",)),
    *_rejected(ALL, "prompt_embeds"),
    *_applied(CHAT, "add_special_tokens", note="default false, since the chat template writes them"),
    *_applied(COMPLETIONS | NATIVE, "add_special_tokens", note="default true"),
    *_applied(COMPLETIONS, "suffix", note="needs a tokenizer with fill-in-the-middle tokens, and texts as `prompt`"),
    *_rejected(CHAT | NATIVE, "suffix", neutral=("",), note="is applied by /v1/completions"),
    *_rejected(ALL, "audio", "guideline"),
    *_rejected(ALL, "modalities", neutral=(["text"],)),
    # Length and stopping
    *_applied(OPENAI, "max_tokens", note="completions default: 16; chat: what the prompt leaves"),
    *_applied(OPENAI, "max_completion_tokens"),
    *_rejected(NATIVE, "max_tokens", "max_completion_tokens",
               note="is not supported by this route: use `max_new_tokens`"),
    *_applied(NATIVE, "max_new_tokens"),
    *_rejected(OPENAI, "max_new_tokens", note="is not supported by this route: use `max_tokens`"),
    *_applied(ALL, "stop", "ignore_eos_token", "ignore_eos"),
    *_applied(NATIVE, "stop_sequences", note="more of `stop`"),
    *_rejected(OPENAI, "stop_sequences", neutral=([],), note="is not supported by this route: use `stop`"),
    *_applied(ALL, "min_tokens", "min_new_tokens",
              note="until then end-of-text and stop tokens cannot be sampled, and no stop string ends the text"),
    *_applied(ALL, "stop_token_ids", note="at most 1024"),
    *_rejected(ALL, "stop_regex", neutral=([], "")),
    *_applied(ALL, "include_stop_str_in_output",
              note="also of stop tokens; default: on LoRAX's routes the text includes stop strings"),
    *_applied(ALL, "no_stop_trim", note="true is `include_stop_str_in_output`"),
    *_rejected(ALL, "repetition_detection", "thinking_token_budget"),
    # Sampling
    *_applied(ALL, "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
              "presence_penalty", "seed", "do_sample"),
    *_applied(ALL, "logit_bias"),
    *_applied(NATIVE, "watermark"),
    *_rejected(OPENAI, "watermark", neutral=(False,), note="is applied by /generate"),
    *_rejected(ALL, "watermarking", neutral=(False,)),
    *_applied(OPENAI, "n"),
    *_rejected(NATIVE, "n", neutral=(1,), note="is not supported by this route: use `best_of`, or /v1/completions"),
    *_applied(COMPLETIONS | NATIVE, "best_of"),
    *_rejected(CHAT, "best_of", neutral=(1,), note="is applied by /v1/completions"),
    *_applied(ALL, "allowed_token_ids", note="at most 16384; all others are excluded"),
    *_applied(ALL, "bad_words",
              note="at most 256 of 256 bytes; excluded at the beginning of a text and after a space"),
    *_rejected(ALL, "use_beam_search", neutral=(False,)),
    *_rejected(ALL, "length_penalty", neutral=(1.0,), note="is of beam search, which this server does not support"),
    *_rejected(ALL, "custom_logit_processor", neutral=("",)),
    # Speculative decoding
    *_applied(ALL, "speculative_tokens", "speculative_method", "speculative_schedule", "speculative_verification",
              "speculative_verify"),
    *_applied(ALL, "speculative_history", note="whether outputs of earlier requests of this tenant are proposed"),
    *_applied(OPENAI, "prediction", "prediction.type", "prediction.content"),
    *_rejected(NATIVE, "prediction", note="is applied by /v1/completions and /v1/chat/completions"),
    *_rejected(ALL, "speculation", note="is not supported by this server: use `speculative_tokens`"),
    # Structured output and tools
    *_applied(ALL, "response_format", note="text, json_object (LoRAX: with a `schema`) or json_schema"),
    *_applied(ALL, "structured_outputs", *(f"structured_outputs.{name}" for name in
              ("json", "json_object", "regex", "choice", "grammar")), note="as in vLLM"),
    *_rejected(ALL, "structured_outputs.structural_tag"),
    *_applied(ALL, "guided_json", "guided_regex", "guided_choice", "guided_grammar", note="as in vLLM"),
    *_applied(ALL, "json_schema", "regex", "ebnf", note="as in SGLang"),
    *_applied(ALL, "grammar", note="as in TGI: `type` is json, json_schema or regex"),
    *_rejected(ALL, "guided_whitespace_pattern", note="is not supported by this server: write a `guided_grammar`"),
    *_applied(CHAT, "tools", "tools[].type", "tools[].function",
              *(f"tools[].function.{name}" for name in ("name", "description", "parameters", "strict"))),
    *_applied(CHAT, "tool_choice", note="auto, none, required, a function, or `allowed_tools`"),
    *_applied(CHAT, "parallel_tool_calls", note="default true"),
    *_applied(CHAT, "tool_prompt", note="as in LoRAX, whose form of tools it selects; needs `tools`"),
    *_rejected(COMPLETIONS | NATIVE, "tools", neutral=([],), note=_CHAT_ALONE),
    *_rejected(COMPLETIONS | NATIVE, "tool_choice", neutral=("none",), note=_CHAT_ALONE),
    *_rejected(COMPLETIONS | NATIVE, "tool_prompt", neutral=("",), note=_CHAT_ALONE),
    *_ignored(COMPLETIONS | NATIVE, "parallel_tool_calls"),
    *_rejected(ALL, "functions", neutral=([],), note=_OLDER),
    *_rejected(ALL, "function_call", neutral=("none",), note=_OLDER),
    # What the answer contains
    *_applied(NATIVE, "details", "decoder_input_details", "return_k_alternatives", "return_full_text"),
    *_applied(OPENAI, "logprobs"),
    *_applied(CHAT, "top_logprobs", note="needs `logprobs`, unless it is 0"),
    *_applied(OPENAI, "stream"),
    *_applied(OPENAI, "stream_options", note="needs `stream`"),
    *_applied(OPENAI, "stream_options.include_usage"),
    *_applied(OPENAI, "stream_options.continuous_usage_stats", note="needs `include_usage`"),
    *_ignored(OPENAI, "stream_options.include_obfuscation"),
    *_applied(OPENAI, "metadata", note="up to 16 texts, which the answer repeats"),
    *_applied(OPENAI, "service_tier", note="the answer has `default`: there is one tier"),
    *_ignored(NATIVE, "metadata", "service_tier"),
    *_applied(ALL, "receipt"),
    *_applied(OPENAI, "prompt_logprobs", note="at most 20; not in streams"),
    *_rejected(NATIVE, "prompt_logprobs", note="is not supported by this route: use `decoder_input_details`"),
    *_applied(NATIVE, "top_n_tokens", note="at most 256; `top_tokens` of the answer, as in TGI"),
    *_rejected(OPENAI, "top_n_tokens", neutral=(0,), note="is not supported by this route: use `logprobs`"),
    *_applied(OPENAI, "logprob_token_ids",
              note="needs `logprobs`; at most 256, which are listed in place of the likeliest tokens, as in vLLM"),
    *_rejected(NATIVE, "logprob_token_ids", neutral=([],),
               note="is applied by /v1/completions and /v1/chat/completions"),
    *_applied(OPENAI, "details",
              note="`tokens` of each choice, with source and log probability, as /generate lists them"),
    *_applied(OPENAI, "return_token_ids", note="`prompt_token_ids` and `token_ids` of the answer"),
    *_rejected(NATIVE, "return_token_ids", neutral=(False,), note="is not supported by this route: use `details`"),
    *_applied(OPENAI, "return_tokens_as_token_ids", note="tokens in `logprobs` are written as `token_id:<id>`"),
    *_applied(ALL, "skip_special_tokens", note="false shows special tokens in the text"),
    *_applied(ALL, "spaces_between_special_tokens", note="the text never has such spaces"),
    *_ignored(COMPLETIONS, "top_logprobs", note="`logprobs` is the number"),
    *_ignored(NATIVE, "logprobs", "top_logprobs", note="`details` and `return_k_alternatives` have them"),
    *_ignored(OPENAI, "decoder_input_details", "return_k_alternatives", "return_full_text"),
    *_ignored(NATIVE, "return_tokens_as_token_ids"),
    *_ignored(ALL, "return_prompt_text", "return_token_offsets"),
    # Requests and callers
    *_applied(OPENAI, "user", note="always gets the same version of a roll-out"),
    *_applied(OPENAI, "request_id", note="the end of the answer's `id`, and `x-request-id` without that header"),
    *_ignored(NATIVE, "user", "request_id"),
    *_applied(ALL, "cache_salt", note="requests share cached prefixes only under equal salts; 1 to 256 characters"),
    *_applied(ALL, "priority", note="default 0; of a caller's waiting requests for an adapter lower ones go first"),
    *_rejected(OPENAI, "extra_body", "parameters", neutral=({},), note="is no field: put its fields at the top level"),
    *_rejected(OPENAI, "sampling_params", neutral=({},), note="is no field: put its fields at the top level"),
    *_ignored(
        ALL, "apply_chat_template", "custom_params", "guided_decoding_backend", "include_reasoning",
        "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs", "moderation",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "rid",
        "safety_identifier", "separate_reasoning", "session_id", "store", "stream_interval",
        "stream_reasoning", "use_cache", "vllm_xargs", "web_search_options",
    ),
)  # fmt: skip
"""In the order of the documentation."""


def rows(route: Route, behaviour: Behaviour) -> dict[str, Row]:
    """The fields that one route treats like this, by name."""
    return {row.name: row for row in ROWS if route in row.routes and row.behaviour is behaviour}


_REJECTED = {route: rows(route, Behaviour.REJECTED) for route in Route}
_PARAMETERS = {**_REJECTED[NATIVE], **rows(NATIVE, Behaviour.APPLIED)}


def rejected(fields: Fields, route: Route, scope: str = "") -> list[tuple[Row, str]]:
    """(row, name) of each unread field that asks for what the route does not do. Neutral values count as read.

    `scope` is the path of `fields` in the table, such as `messages[].`.
    """
    table = _REJECTED[route]
    found = []
    for name, value in fields.unread():
        row = table.get(scope + name)
        if row is None:
            continue
        if row.asks(value):
            found.append((row, name))
        else:
            fields.take(name)
    return found


def check_unread(fields: Fields, route: Route, scope: str = "", path: str = "") -> None:
    """Raises UnsupportedField for the first field that `rejected` finds; `path` precedes its name in the error."""
    for row, name in rejected(fields, route, scope):
        raise row.error(path + name)


def misplaced(fields: Fields) -> list[str]:
    """Unread fields of a body of LoRAX's routes that ask for something that belongs in `parameters`."""
    return [
        name
        for name, value in fields.unread()
        if (row := _PARAMETERS.get(name)) is not None
        and row.asks(value)
        and not any(_is_same(value, e) for e in _EMPTY)
    ]

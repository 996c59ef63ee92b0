"""What the bodies of all generation routes have in common, and what the bodies of all routes to the model become."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from lorikeet.proto.params import LogprobParams, Pooling, SamplingParams
from lorikeet.router.schemas.adapters import AdapterFields, GeneratingAdapterGroup
from lorikeet.router.schemas.constraints import ConstraintGroup, Constraints
from lorikeet.router.schemas.grammar import GrammarFields, StructuredGroup
from lorikeet.router.schemas.model import I32, Body, Ignored, Rejected, Rule
from lorikeet.router.schemas.sampling import SamplingGroup
from lorikeet.router.schemas.speculation import SpeculationFields, SpeculationGroup

MAX_SALT = 256
"""Characters of `cache_salt`."""
_OLDER = "is OpenAI's older form, which this server does not support: use `tools` and `tool_choice`"
_TEMPLATE = "is applied by /v1/chat/completions, which has a chat template"
_CHAT_ONLY = "is applied by /v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class RequestFields:
    """What a body asks of the model: typed and checked, neither tokenized nor resolved."""

    adapter: AdapterFields
    heads: AdapterFields | None = None
    """Adapter fields of `heads_id`; None on routes without it."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobParams = field(default_factory=LogprobParams)
    num_sequences: int = 1
    """Sequences of each prompt."""
    seed: int | None = None
    """None for random ones. Further sequences of a prompt have the numbers after it."""
    stop: tuple[str, ...] = ()
    include_stop: bool = True
    """Whether the stop string stays in the text, unless the constraints say otherwise."""
    constraints: Constraints = field(default_factory=Constraints)
    speculation: SpeculationFields = field(default_factory=SpeculationFields)
    grammar: GrammarFields | None = None
    """That of a conversation with tools is its own."""
    pooling: Pooling | None = None
    cache_salt: str | None = None
    """Requests share cached prefixes only under equal ones."""
    priority: int = 0
    receipt: bool = False
    is_probe: bool = False
    """Whether the output is discarded, because only the prompt is scored."""


class GenerationGroup(StructuredGroup, SpeculationGroup, ConstraintGroup, SamplingGroup, GeneratingAdapterGroup):
    """Fields of every generation route."""

    cache_salt: Annotated[str, Rule(f"must have 1 to {MAX_SALT} characters")] | None = Field(
        None, min_length=1, max_length=MAX_SALT, description="Requests share cached prefixes only under equal salts"
    )
    priority: I32 = Field(0, description="Of a caller's waiting requests for an adapter, lower ones are served first")
    prompt_embeds = audio = guideline = Rejected()
    modalities = Rejected(neutral=(["text"],))
    watermarking = Rejected(neutral=(False,))
    functions = Rejected(_OLDER, ([],))
    function_call = Rejected(_OLDER, ("none",))
    return_prompt_text = return_token_offsets = apply_chat_template = custom_params = Ignored()
    guided_decoding_backend = include_reasoning = kv_transfer_params = media_io_kwargs = Ignored()
    mm_processor_kwargs = moderation = prompt_cache_key = prompt_cache_options = Ignored()
    prompt_cache_retention = rid = safety_identifier = separate_reasoning = session_id = store = Ignored()
    stream_interval = stream_reasoning = use_cache = vllm_xargs = web_search_options = Ignored()


class ReportGroup(Body):
    """Fields that ask for more than a text."""

    details: bool = Field(False, description="Adds the tokens, with source and log probability")
    receipt: bool = Field(False, description="Adds what is needed to reproduce the text, for `lorikeet-replay`")


class PromptOnlyGroup(Body):
    """Fields of conversations, on routes that take a prompt."""

    add_generation_prompt = Rejected(_TEMPLATE, (True,))
    continue_final_message = Rejected(_TEMPLATE, (False,))
    chat_template = Rejected(_TEMPLATE, ("",))
    chat_template_kwargs = Rejected(_TEMPLATE, ({},))
    documents = Rejected(_TEMPLATE, ([],))
    tools = Rejected(_CHAT_ONLY, ([],))
    tool_choice = Rejected(_CHAT_ONLY, ("none",))
    tool_prompt = Rejected(_CHAT_ONLY, ("",))
    reasoning_effort = verbosity = parallel_tool_calls = Ignored()


def without(values: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """A body without the field at `path`."""
    name, *rest = path
    if rest and isinstance(values.get(str(name)), dict):
        return {**values, str(name): without(values[str(name)], tuple(rest))}
    return {other: value for other, value in values.items() if other != name}

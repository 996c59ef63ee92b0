"""Names of span attributes: OpenTelemetry's conventions for HTTP and GenAI, `gen_ai.latency.*` as vLLM and SGLang emit
it, and `lorikeet.*`.

The GenAI conventions are still in development and no longer part of the Python package of conventions.
"""

from collections.abc import Iterator
from typing import Any

from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.router.requests.generation import Generation, StepEvent
from lorikeet.router.requests.request import GenerationRequest

Attributes = dict[str, Any]

PROVIDER = "lorikeet"
OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), "chat"),
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/embed", "/pooling"), "embeddings"),
    **dict.fromkeys(("/classify", "/classify_batch"), "classify"),
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
}
"""By route; every other route to the model completes a text. The conventions have no names for the last three kinds,
and allow others.
"""


def operation(route: str) -> str:
    return OPERATIONS.get(route, "text_completion")


def of_request(wanted: list[GenerationRequest]) -> Attributes:
    """What was asked for: settings and names, never a text."""
    if not wanted:
        return {}
    attributes = {} if wanted[0].pooling is not None else _of_output(wanted[0], len(wanted))
    if (adapter := wanted[0].adapter) is not None:
        attributes["lorikeet.adapter"] = adapter.name[:256]
    return attributes


def _of_output(request: GenerationRequest, num_choices: int) -> Attributes:
    """Attributes of a request for text, from its settings."""
    sampling = request.sampling
    attributes: Attributes = {
        "gen_ai.request.seed": request.sampling.seed,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.choice.count": num_choices,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.output.type": "json" if request.grammar_kind == "json_schema" else "text",
        "lorikeet.spec.method": request.speculation.method,
    }
    if sampling.do_sample:
        attributes["gen_ai.request.temperature"] = sampling.temperature
        attributes["gen_ai.request.top_p"] = sampling.top_p
        attributes["gen_ai.request.top_k"] = sampling.top_k
    return attributes


def of_response(generations: list[Generation], began_at: float) -> Attributes:
    """What was generated, and how long it took; seconds count from the request's arrival at `began_at`."""
    if not generations:
        return {}
    first = generations[0]
    prompts = {id(each.request.prompt_ids): len(each.request.prompt_ids) for each in generations}
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": sum(prompts.values()),
        "lorikeet.retries": sum(each.routing.num_retries for each in generations),
    }
    if first.request.pooling is None:
        attributes |= _of_texts(generations)
    if first.digest:
        attributes["lorikeet.adapter.digest"] = first.digest[:16]
    if first.routing.adapter_tier:
        attributes["lorikeet.tier"] = first.routing.adapter_tier
    return attributes | dict(_latencies(first, began_at))


def _of_texts(generations: list[Generation]) -> Attributes:
    """Attributes of a request for text, from its outputs."""
    stats = [each.speculation_stats for each in generations if each.speculation_stats is not None]
    attributes: Attributes = {
        "gen_ai.usage.output_tokens": sum(each.num_generated for each in generations),
        "gen_ai.usage.cache_read.input_tokens": generations[0].num_cached,
        "gen_ai.response.finish_reasons": [each.finish_reason.value for each in generations if each.finish_reason],
        "lorikeet.steps": sum(each.num_generated - each.num_skipped for each in generations),
    }
    if num_reasoning := sum(each.num_reasoning for each in generations):
        attributes["gen_ai.usage.reasoning.output_tokens"] = num_reasoning
    if stats:
        attributes["lorikeet.spec.drafted_tokens"] = sum(each.num_drafted for each in stats)
        attributes["lorikeet.spec.accepted_tokens"] = sum(each.num_accepted for each in stats)
    return attributes


def _latencies(generation: Generation, began_at: float) -> Iterator[tuple[str, float]]:
    """In seconds, of the first sequence."""
    routing, first, last = generation.routing, generation.first_token_at, generation.last_token_at
    if routing.waited_s is not None:
        yield "gen_ai.latency.time_in_queue", routing.waited_s
    if first is None or last is None or routing.sent_at is None:
        return
    yield "gen_ai.response.time_to_first_chunk", first - began_at
    yield "gen_ai.latency.time_to_first_token", first - began_at
    yield "gen_ai.latency.time_in_model_prefill", first - routing.sent_at
    yield "gen_ai.latency.time_in_model_decode", last - first
    yield "gen_ai.latency.time_in_model_inference", last - routing.sent_at


def of_step(step: StepEvent) -> Attributes:
    """Attributes of the event of one step."""
    attributes: Attributes = {"lorikeet.step.number": step.number, "lorikeet.step.tokens": step.num_tokens}
    if step.sources:
        attributes["lorikeet.step.sources"] = [SOURCE_NAMES[source] for source in step.sources]
    if step.num_drafted:
        attributes["lorikeet.step.drafted_tokens"] = step.num_drafted
        attributes["lorikeet.step.accepted_tokens"] = step.num_accepted
    if step.step_ms:
        attributes["lorikeet.step.seconds"] = step.step_ms / 1000
    if step.batch_tokens:
        attributes["lorikeet.step.batch_tokens"] = step.batch_tokens
        attributes["lorikeet.step.running_requests"] = step.num_running
    return attributes

"""OpenTelemetry traces: a span for the HTTP request, and one for each stay in the loader, the queue and a shard.

The SDK exports. While a request runs its stays are only recorded (`Timeline` in `requests/generation.py`); spans are
made when it has ended. A request that is not sampled costs the decision only. Attributes have the names of
OpenTelemetry's conventions for HTTP and GenAI; `gen_ai.latency.*` is as in vLLM and SGLang. The GenAI conventions are
still in development and no longer part of the Python package of conventions.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from lorikeet.proto.draft_sources import SOURCE_NAMES
from lorikeet.proto.version import version
from lorikeet.router.config import RouterConfig
from lorikeet.router.http_protocol import header
from lorikeet.router.requests.generation import MAX_STEPS, Generation, Period, StepEvent
from lorikeet.router.requests.request import GenerationRequest
from lorikeet.router.usage_log import Ending

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


def operation_of(route: str) -> str:
    return OPERATIONS.get(route, "text_completion")


def of_request(requests: list[GenerationRequest]) -> Attributes:
    """What was asked for: settings and names, never a text."""
    if not requests:
        return {}
    attributes = {} if requests[0].pooling is not None else _of_output(requests[0], len(requests))
    if (adapter := requests[0].adapter) is not None:
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
    prompts = {id(generation.request.prompt_ids): len(generation.request.prompt_ids) for generation in generations}
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": sum(prompts.values()),
        "lorikeet.retries": sum(generation.routing.num_retries for generation in generations),
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
    stats = [generation.speculation_stats for generation in generations if generation.speculation_stats is not None]
    attributes: Attributes = {
        "gen_ai.usage.output_tokens": sum(generation.num_generated for generation in generations),
        "gen_ai.usage.cache_read.input_tokens": generations[0].num_cached,
        "gen_ai.response.finish_reasons": [
            generation.finish_reason.value for generation in generations if generation.finish_reason
        ],
        "lorikeet.steps": sum(generation.num_generated - generation.num_skipped for generation in generations),
    }
    if num_reasoning := sum(generation.num_reasoning for generation in generations):
        attributes["gen_ai.usage.reasoning.output_tokens"] = num_reasoning
    if stats:
        attributes["lorikeet.spec.drafted_tokens"] = sum(counts.num_drafted for counts in stats)
        attributes["lorikeet.spec.accepted_tokens"] = sum(counts.num_accepted for counts in stats)
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


CLOSE_MS = 2000
"""How long the last spans may take."""
_NS = 1_000_000_000


class OncePerMinute(logging.Filter):
    """Lets one line through per minute, with the number of lines that were left out since the one before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._next, self._num_dropped = clock, -math.inf, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Called by `logging` for each line."""
        if self._clock() < self._next:
            self._num_dropped += 1
            return False
        if self._num_dropped:
            record.msg = f"{record.getMessage()} ({self._num_dropped} more lines since the last one)"
            record.args = ()
        self._next, self._num_dropped = self._clock() + 60.0, 0
        return True


EXPORTERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that repeat themselves while the endpoint does not answer."""


class Tracing:
    """Tracing of one router process."""

    def __init__(self, config: RouterConfig, exporter: SpanExporter) -> None:
        resource = Resource({"service.name": "lorikeet.router", "service.version": version()})
        self._provider = TracerProvider(
            sampler=DEFAULT_ON,  # the parent decides; `begin` does where there is none
            resource=resource.merge(OTELResourceDetector().detect()),
            span_limits=SpanLimits(max_span_attributes=128, max_events=MAX_STEPS, max_span_attribute_length=1024),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lorikeet.router", version())
        self._propagator = TraceContextTextMapPropagator()
        self._model = config.model_id
        self._sample_ratio = config.otlp_sample_ratio

    @classmethod
    def configured(cls, config: RouterConfig) -> "Tracing | None":
        """With the exporter that the configuration names; None where there is none."""
        if config.otlp_endpoint is None:
            return None
        once = OncePerMinute()
        for name in EXPORTERS:
            logging.getLogger(name).addFilter(once)
        is_plain = not config.otlp_endpoint.startswith("https://")
        return cls(config, OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=is_plain))

    def begin(self, scope: Scope) -> "RequestTrace | None":
        """The trace of a request that has arrived; None where it is not sampled.

        The SDK takes 30 µs to make a span that is not recorded, which would be a hundredth of a short request.
        """
        parent = Context()
        is_child = False
        if header(scope, b"traceparent") is not None:
            names = ("traceparent", "tracestate")
            carrier = {name: value for name in names if (value := header(scope, name.encode())) is not None}
            parent = self._propagator.extract(carrier, parent)
            is_child = get_current_span(parent).get_span_context().is_valid
        if not is_child and random.random() >= self._sample_ratio:
            return None
        span = self._tracer.start_span("request", parent, SpanKind.SERVER)
        return RequestTrace(self._tracer, span, self._model) if span.is_recording() else None

    def close(self) -> None:
        """Export what is left, within CLOSE_MS."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


class RequestTrace:
    """Trace of one sampled request."""

    def __init__(self, tracer: Tracer, span: Span, model: str) -> None:
        self._tracer = tracer
        self._span = span
        self._model = model
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        """From the clock of timelines to that of spans."""
        self.is_stream = False

    @property
    def trace_id(self) -> str:
        """The id that the collector shows."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def end(self, scope: Scope, client: str, ending: Ending) -> None:
        """The answer is complete: make the spans. `client` is the client's address as logs show it."""
        state: Mapping[str, Any] = scope["state"]
        requests, generations = state.get("requests", []), state.get("generations", [])
        operation = operation_of(state.get("served_as", ending.route))
        adapter = requests[0].adapter if requests else None
        model = self._model if adapter is None else adapter.name[:256]
        self._span.update_name(f"{operation} {model}")
        server = scope.get("server") or ("", None)
        of_http = {
            "http.request.method": scope["method"],
            "http.route": ending.route,
            "http.response.status_code": ending.status,
            "url.path": scope["path"],
            "server.address": server[0],
            "client.address": client,
            "lorikeet.request_id": state["request_id"],
        }
        of_model = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": state["request_id"],
            "gen_ai.request.stream": self.is_stream,
            "gen_ai.latency.e2e": ending.ended_at - ending.began_at,
        }
        self._span.set_attributes({**of_http, **of_model, **of_request(requests)})
        self._span.set_attributes(of_response(generations, ending.began_at))
        if server[1] is not None:
            self._span.set_attribute("server.port", server[1])
        if ending.error is not None:
            self._span.set_attribute("error.type", ending.error)
        if ending.error is not None and not 400 <= ending.status < 500:
            self._span.set_status(Status(StatusCode.ERROR))
        for choice, generation in enumerate(generations):
            self._add_periods(generation, choice, ending.ended_at)
        self._span.end(self._at(ending.ended_at))

    def _add_periods(self, generation: Generation, choice: int, ended_at: float) -> None:
        if generation.timeline is None:
            return
        for period in generation.timeline.periods:
            span = self._tracer.start_span(
                period.name, set_span_in_context(self._span, Context()), start_time=self._at(period.began_at)
            )
            fields = {f"lorikeet.{name}": value for name, value in period.fields.items()}
            span.set_attributes({**fields, "lorikeet.choice": choice})
            self._add_steps(span, period)
            if period.outcome:
                span.set_attribute("lorikeet.outcome", period.outcome)
            if period.outcome == "retried":
                span.set_status(Status(StatusCode.ERROR, "the shard was lost, or could not continue the request"))
            span.end(self._at(ended_at if period.ended_at is None else period.ended_at))

    def _add_steps(self, span: Span, period: Period) -> None:
        for step in period.steps:
            span.add_event("step", of_step(step), self._at(step.at))
        if period.num_left_out:
            span.set_attribute("lorikeet.steps_left_out", period.num_left_out)

    def _at(self, moment: float) -> int:
        """Nanoseconds since the epoch for a moment of time.monotonic()."""
        return int(moment * _NS) + self._offset_ns

"""Traces: a span for the HTTP request, and under it one for each stay in the adapter loader, the queue and a shard.

The SDK exports. While a request runs its stays are only recorded (`requests/timeline.py`); the spans are
made when it has ended. A request that is not sampled has no timeline, so it costs the decision alone.
"""

import random
import time
from collections.abc import Mapping
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
from starlette.datastructures import Headers
from starlette.types import Scope

from lorikeet.proto.version import version
from lorikeet.router.config import RouterConfig
from lorikeet.router.requests.generation import MAX_STEPS, Generation, Period
from lorikeet.router.tracing import attributes
from lorikeet.router.usage.record import Ending

CLOSE_MS = 2000
"""How long the last spans may take."""
_NS = 1_000_000_000


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
        is_plain = not config.otlp_endpoint.startswith("https://")
        return cls(config, OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=is_plain))

    def begin(self, headers: Headers) -> "RequestTrace | None":
        """The trace of a request that has arrived; None where it is not sampled.

        The SDK takes 30 µs to make a span that is not recorded, which would be a hundredth of a short request.
        """
        parent = Context()
        if "traceparent" in headers:
            carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
            parent = self._propagator.extract(carrier, parent)
        is_child = bool(parent) and get_current_span(parent).get_span_context().is_valid
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
        """As the collector shows it."""
        return format_trace_id(self._span.get_span_context().trace_id)

    def end(self, scope: Scope, client: str, ending: Ending) -> None:
        """The answer is complete: make the spans. `client` is the client's address as logs show it."""
        state: Mapping[str, Any] = scope["state"]
        wanted, generations = state.get("wanted", []), state.get("generations", [])
        operation = attributes.operation(state.get("served_as", ending.route))
        adapter = wanted[0].adapter if wanted else None
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
            "gen_ai.provider.name": attributes.PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": state["request_id"],
            "gen_ai.request.stream": self.is_stream,
            "gen_ai.latency.e2e": ending.ended_at - ending.began_at,
        }
        self._span.set_attributes({**of_http, **of_model, **attributes.of_request(wanted)})
        self._span.set_attributes(attributes.of_response(generations, ending.began_at))
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
            span.add_event("step", attributes.of_step(step), self._at(step.at))
        if period.num_left_out:
            span.set_attribute("lorikeet.steps_left_out", period.num_left_out)

    def _at(self, moment: float) -> int:
        """Nanoseconds since the epoch for a moment of time.monotonic()."""
        return int(moment * _NS) + self._offset_ns

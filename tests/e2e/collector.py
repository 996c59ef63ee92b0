"""An OpenTelemetry collector in the test's own process: it receives spans over OTLP and gRPC, and keeps them."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 60.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free loopback port from `with` on."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._resources: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._arrived:
            for group in request.resource_spans:
                self._resources.append(values(group.resource.attributes))
                for scoped in group.scope_spans:
                    self._spans += scoped.spans
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def services(self) -> set[str]:
        """Names of the services that have sent spans."""
        return {each["service.name"] for each in self._resources}

    def trace(self, trace_id: str, is_complete: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans of a trace, once `is_complete` holds for them, the earliest first."""
        end = time.monotonic() + WAIT_S
        with self._arrived:
            while True:
                found = [span for span in self._spans if span.trace_id.hex() == trace_id]
                if is_complete(found):
                    return sorted(found, key=lambda span: span.start_time_unix_nano)
                assert self._arrived.wait(end - time.monotonic()), [span.name for span in found]


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as Python's values."""
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)

"""Spans of requests to a scripted shard: their tree, their attributes, what they leave out, and what they cost."""

import logging
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from starlette.types import Scope

from lorikeet.proto.shard_pb2 import FINISH_ERROR, PooledModel, RequestOutput
from lorikeet.router import request_tracing
from lorikeet.router.config import RouterConfig
from tests.router.scripted_shard import Script
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
CHAT = {"model": "test/model", "messages": [{"role": "user", "content": "secret words"}], "max_tokens": 8}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where spans go instead of a collector."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(request_tracing, "OTLPSpanExporter", lambda **options: memory)
    return memory


@asynccontextmanager
async def traced(folder: Path, **fields: Any) -> AsyncIterator[Serving]:
    async with serving(folder, otlp_endpoint="http://collector:4317", **fields) as server:
        yield server
        assert server.service.tracing is not None
        server.service.tracing.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


def test_an_endpoint_that_does_not_answer_logs_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    once = request_tracing.OncePerMinute(lambda: now[0])
    logger = logging.getLogger("tests.exporter")
    logger.addFilter(once)
    for seconds in range(0, 121, 5):
        now[0] = float(seconds)
        logger.error("Failed to export %s", "traces")
    assert [record.getMessage() for record in caplog.records] == [
        "Failed to export traces",
        "Failed to export traces (11 more lines since the last one)",
        "Failed to export traces (11 more lines since the last one)",
    ]


@pytest.mark.usefixtures("exporter")
async def test_the_exporter_s_loggers_are_limited(tmp_path: Path) -> None:
    async with traced(tmp_path):
        logger = sys.modules["opentelemetry.exporter.otlp.proto.grpc.exporter"].logger
        assert logger.name in request_tracing.EXPORTERS
        assert any(isinstance(entry, request_tracing.OncePerMinute) for entry in logger.filters)


async def test_the_spans_of_a_request_are_one_tree_under_its_parent(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async with traced(tmp_path) as server:
        server.shard.answer = lambda submit: Script(server.ids("hello you"), per_step=3, num_rejected=1)
        answer = await server.client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT})
        assert answer.status_code == 200
    spans = by_name(exporter)
    [top] = spans.pop("chat test/model")
    assert set(spans) == {"queue", "dispatch"}
    assert format(top.context.trace_id, "032x") == PARENT.split("-")[1]
    assert top.parent is not None and format(top.parent.span_id, "016x") == PARENT.split("-")[2]
    for [span] in spans.values():
        assert span.parent is not None and span.parent.span_id == top.context.span_id
        assert top.start_time <= span.start_time <= span.end_time <= top.end_time
    [dispatch] = spans["dispatch"]
    assert dispatch.attributes["lorikeet.shard"] == server.shard.address
    steps = [event for event in dispatch.events if event.name == "step"]
    assert sum(step.attributes["lorikeet.step.tokens"] for step in steps) == 8
    assert [step.timestamp for step in steps] == sorted(step.timestamp for step in steps)
    assert any(step.attributes.get("lorikeet.step.drafted_tokens") for step in steps)


async def test_attributes_have_the_names_of_the_conventions(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    body = CHAT | {"temperature": 0.5, "top_p": 0.75, "seed": 3, "stream": True}
    async with traced(tmp_path) as server:
        server.says("hello", ends=True)
        await server.events("/v1/chat/completions", body)
    [top] = by_name(exporter)["chat test/model"]
    expected = {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lorikeet",
        "gen_ai.request.model": "test/model",
        "gen_ai.request.stream": True,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.response.finish_reasons": ("eos_token",),
        "gen_ai.usage.output_tokens": 5,
        "lorikeet.retries": 0,
    }
    assert {name: top.attributes.get(name) for name in expected} == expected
    latencies = ["e2e", "time_in_queue", "time_to_first_token"]
    latencies += [f"time_in_model_{part}" for part in ("prefill", "decode", "inference")]
    values = [top.attributes[f"gen_ai.latency.{name}"] for name in latencies]
    assert all(isinstance(value, float) and value >= 0 for value in values)
    assert values[0] == max(values)


CHATS = [{"role": "user", "content": "Hi"}]
THINKS = "[assistant]<think>\n"


@pytest.mark.parametrize(
    ("route", "body", "operation"),
    [
        ("/v1/chat/completions", {"messages": CHATS}, "chat"),
        pytest.param("/v1/responses", {"input": "Hi"}, "chat", marks=pytest.mark.long),
        pytest.param("/v1/messages", {"messages": CHATS, "max_tokens": 2}, "chat", marks=pytest.mark.long),
        ("/v1/completions", {"prompt": "Hi"}, "text_completion"),
        ("/generate", {"inputs": "Hi"}, "text_completion"),
        pytest.param("/", {"inputs": "Hi"}, "text_completion", marks=pytest.mark.long),
        pytest.param("/invocations", {"messages": CHATS}, "chat", marks=pytest.mark.long),
        ("/invocations", {"prompt": "Hi"}, "text_completion"),
        pytest.param("/invocations", {"inputs": "Hi"}, "text_completion", marks=pytest.mark.long),
    ],
)
async def test_the_operation_follows_the_route(
    tmp_path: Path, exporter: InMemorySpanExporter, route: str, body: dict[str, Any], operation: str
) -> None:
    async with traced(tmp_path) as server:
        server.says("hello", ends=True)
        answer = await server.client.post(route, json={"model": "test/model", **body})
        assert answer.status_code == 200, answer.text
    [top] = by_name(exporter)[f"{operation} test/model"]
    assert (top.attributes["gen_ai.operation.name"], top.attributes["http.route"]) == (operation, route)
    assert top.attributes["gen_ai.output.type"] == "text"


@pytest.mark.parametrize(
    ("task", "route", "body", "operation"),
    [
        ("embed", "/v1/embeddings", {"input": "Hi"}, "embeddings"),
        pytest.param(
            "embed", "/v2/embed", {"texts": ["Hi"], "input_type": "search_query"}, "embeddings", marks=pytest.mark.long
        ),
        pytest.param("embed", "/embed", {"inputs": "Hi"}, "embeddings", marks=pytest.mark.long),
        pytest.param("embed", "/pooling", {"input": "Hi"}, "embeddings", marks=pytest.mark.long),
        pytest.param("embed", "/invocations", {"input": "Hi"}, "embeddings", marks=pytest.mark.long),
        ("embed", "/invocations", {"inputs": "Hi"}, "embeddings"),
        ("embed", "/score", {"text_1": "Hi", "text_2": "You"}, "score"),
        pytest.param("embed", "/v1/rerank", {"query": "Hi", "documents": ["You"]}, "rerank", marks=pytest.mark.long),
        pytest.param("embed", "/invocations", {"query": "Hi", "documents": ["You"]}, "rerank", marks=pytest.mark.long),
        ("classify", "/classify", {"input": "Hi"}, "classify"),
    ],
)
async def test_models_without_text_have_no_settings_of_text(
    tmp_path: Path, exporter: InMemorySpanExporter, task: str, route: str, body: dict[str, Any], operation: str
) -> None:
    model = PooledModel(task=task, pooling="mean", size=3, is_encoder=True, is_whole=True)
    async with traced(tmp_path, pooled_model=model) as server:
        answer = await server.client.post(route, json={"model": "test/model", **body})
        assert answer.status_code == 200, answer.text
    [top] = by_name(exporter)[f"{operation} test/model"]
    assert top.attributes["gen_ai.usage.input_tokens"] > 0
    assert {name for name in top.attributes if name.startswith("gen_ai.request.")} == {
        "gen_ai.request.model",
        "gen_ai.request.stream",
    }
    assert not {"gen_ai.output.type", "gen_ai.usage.output_tokens", "lorikeet.spec.method"} & set(top.attributes)


@pytest.mark.parametrize(
    ("streams", "route"),
    [
        (False, "/v1/chat/completions"),
        (True, "/v1/messages"),
        pytest.param(False, "/v1/responses", marks=pytest.mark.long),
        pytest.param(False, "/v1/messages", marks=pytest.mark.long),
        pytest.param(True, "/v1/chat/completions", marks=pytest.mark.long),
        pytest.param(True, "/v1/responses", marks=pytest.mark.long),
    ],
)
async def test_reasoning_is_counted(tmp_path: Path, exporter: InMemorySpanExporter, route: str, streams: bool) -> None:
    body: dict[str, Any] = {"model": "", "stream": streams, "max_tokens": 64, "messages": CHATS}
    if route == "/v1/responses":
        body = {"model": "", "stream": streams, "input": "Hi"}
    async with traced(tmp_path, chat_template=THINKS) as server:
        server.says("Hm, well.\n</think>\n\nYes.", ends=True)
        assert (await server.client.post(route, json=body)).status_code == 200
        number = len(server.ids("Hm, well."))
    [top] = by_name(exporter)["chat test/model"]
    assert top.attributes["gen_ai.usage.reasoning.output_tokens"] == number


def documented() -> set[str]:
    """Names in the table of docs/tracing.md; `.b` after `a.c` is short for `a.b`."""
    text = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
    table = text.split("## Attributes of the request")[1].split("\n## ")[0]
    names, prefix = set(), ""
    for line in table.splitlines():
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            if name.startswith("."):
                names.add(prefix + name)
            elif "." in name:
                prefix = name.rpartition(".")[0]
                names.add(name)
    return names


async def test_the_documented_attributes_are_those_that_requests_have(
    tmp_path: Path, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "vectors").mkdir()
    async with traced(tmp_path / "text", adapters=True, chat_template=THINKS, speculative_tokens=3) as server:
        server.shard.answer = lambda submit: Script(server.ids("Hm.\n</think>\n\nYes."), per_step=3, num_rejected=1)
        sampled = CHAT | {"temperature": 0.5, "top_k": 4, "max_tokens": 64, "model": server.adapter("fox")}
        assert (await server.client.post("/v1/chat/completions", json=sampled)).status_code == 200
        assert (await server.client.post("/generate", json={"inputs": 7})).status_code == 422
        assert (await server.client.post("/v1/completions", json={"model": "", "prompt": "a"})).status_code == 200
    model = PooledModel(task="embed", pooling="mean", size=3, is_encoder=True, is_whole=True)
    other = InMemorySpanExporter()  # the first one is closed with its server
    monkeypatch.setattr(request_tracing, "OTLPSpanExporter", lambda **options: other)
    async with traced(tmp_path / "vectors", pooled_model=model) as server:
        assert (await server.client.post("/embed", json={"inputs": "a"})).status_code == 200
    spans = [*exporter.get_finished_spans(), *other.get_finished_spans()]
    tops = [span for span in spans if span.kind == SpanKind.SERVER]
    assert len(tops) == 4
    assert {name for top in tops for name in top.attributes} == documented()


async def test_no_span_holds_a_text(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with traced(tmp_path) as server:
        server.says("private answer", ends=True)
        await server.client.post("/v1/chat/completions", json=CHAT | {"stop": ["halt!"], "user": "somebody"})
    shown = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert len(shown) > 1000
    for text in ("secret words", "private answer", "halt!", "somebody"):
        assert text not in shown


async def test_an_adapter_s_load_and_its_tier_are_shown(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with traced(tmp_path, adapters=True) as server:
        name = server.adapter("fox")
        for _ in range(2):
            body = {"inputs": "a", "parameters": {"adapter_id": name, "max_new_tokens": 2}}
            assert (await server.client.post("/generate", json=body)).status_code == 200
    spans = by_name(exporter)
    assert len(spans["text_completion fox"]) == 2
    first = spans["text_completion fox"][0]
    assert first.attributes["lorikeet.adapter"] == "fox"
    assert first.attributes["lorikeet.tier"] == spans["dispatch"][0].attributes["lorikeet.tier"] != ""
    load = next(span for span in spans["adapter_load"] if span.parent.span_id == first.context.span_id)
    assert load.end_time <= spans["queue"][0].start_time


async def test_a_request_that_is_sent_again_has_two_dispatches(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    refused = RequestOutput(finish_reason=FINISH_ERROR, error="no room", retryable=True)
    async with traced(tmp_path) as server:
        scripts = [Script((), outputs=[refused]), Script(server.ids("hello you"))]
        server.shard.answer = lambda submit: scripts.pop(0)
        body = {"inputs": "a", "parameters": {"max_new_tokens": 4}}
        assert (await server.client.post("/generate", json=body)).status_code == 200
    spans = by_name(exporter)
    [top] = spans["text_completion test/model"]
    assert (top.attributes["lorikeet.retries"], top.attributes["gen_ai.usage.output_tokens"]) == (1, 4)
    assert len(spans["queue"]) == 2
    first, second = sorted(spans["dispatch"], key=lambda span: span.start_time)
    assert (first.attributes["lorikeet.outcome"], first.status.is_ok) == ("retried", False)
    assert second.attributes["lorikeet.attempt"] == 2
    assert sum(event.attributes["lorikeet.step.tokens"] for event in second.events) == 4


async def test_a_failure_is_named(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with traced(tmp_path) as server:
        server.shard.answer = lambda submit: Script(server.ids("a"), error="broken")
        assert (await server.client.post("/generate", json={"inputs": "a"})).status_code == 424
        assert (await server.client.post("/generate", json={"inputs": 7})).status_code == 422
    failed, invalid = by_name(exporter)["text_completion test/model"]
    assert (failed.attributes["error.type"], invalid.attributes["error.type"]) == ("generation", "bad_request")
    assert failed.attributes["http.response.status_code"] == 424
    assert by_name(exporter)["dispatch"][0].attributes["lorikeet.outcome"] == "GenerationFailed"


@pytest.mark.parametrize(
    ("ratio", "parent", "is_traced"),
    [(1.0, UNSAMPLED, False), (0.0, PARENT, True), (0.0, None, False), (1.0, None, True), (1.0, "00-zz", True)],
)
async def test_the_parent_decides_and_the_ratio_where_there_is_none(
    tmp_path: Path, exporter: InMemorySpanExporter, ratio: float, parent: str | None, is_traced: bool
) -> None:
    headers = {} if parent is None else {"traceparent": parent}
    async with traced(tmp_path, otlp_sample_ratio=ratio) as server:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
        assert (await server.client.post("/generate", json=body, headers=headers)).status_code == 200
        assert (await server.client.get("/health", headers=headers)).status_code == 200
    assert len(exporter.get_finished_spans()) == (3 if is_traced else 0)


def scope_with(parent: str | None) -> Scope:
    return {"headers": [] if parent is None else [(b"traceparent", parent.encode())]}


@pytest.mark.parametrize("parent", [None, "00-zz"])
def test_a_ratio_of_the_requests_without_a_parent_is_sampled(parent: str | None) -> None:
    config = RouterConfig(model_id="m", model_path="", shard_addresses=("unix:/a",), otlp_sample_ratio=0.25)
    traces = request_tracing.Tracing(config, InMemorySpanExporter())
    sampled = sum(traces.begin(scope_with(parent)) is not None for _ in range(4000))
    assert 850 < sampled < 1150  # five standard deviations
    assert all(traces.begin(scope_with(PARENT)) for _ in range(50))
    assert not any(traces.begin(scope_with(UNSAMPLED)) for _ in range(50))
    traces.close()


@contextmanager
def counted(calls: Counter[bool]) -> Iterator[None]:
    """Count Python calls of this thread by whether they belong to traces."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            is_of_traces = "/opentelemetry/" in code.co_filename or code.co_filename.endswith("/request_tracing.py")
            calls[is_of_traces or code.co_qualname.startswith("Timeline.")] += 1

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


async def test_a_request_that_is_not_sampled_costs_less_than_a_hundredth(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    """By counting calls of functions: those of traces do not depend on the number of tokens."""
    few, many = Counter[bool](), Counter[bool]()
    async with traced(tmp_path, otlp_sample_ratio=0.0) as server:
        server.shard.answer = lambda submit: Script([5] * submit.max_new_tokens, step_seconds=0.001)
        for num_tokens, calls in ((8, Counter[bool]()), (8, few), (128, many)):
            with counted(calls):
                body = {"inputs": "a", "parameters": {"max_new_tokens": num_tokens}}
                await server.events("/generate_stream", body)
    assert 0 < many[True] <= 0.01 * many.total(), many
    assert few[True] == many[True]
    assert not exporter.get_finished_spans()

"""The trace of one request as a collector receives it: from HTTP to the steps of two replicas, one of them killed."""

import os
import secrets
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.collector import values
from tests.e2e.conftest import Replicas
from tests.e2e.launched import Launched
from tests.e2e.test_recovery import until_back, until_tokens

NUM_TOKENS = 300


def cpu_ticks(pid: int) -> int:
    """CPU ticks of the process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def until_idle(launched: Launched) -> None:
    """A shard that was restarted computes until it is warm: it must not be taken for the one with the request."""
    end, before = time.monotonic() + 120, [-1, -1]
    while (now := [cpu_ticks(launched.shard(index)) for index in range(2)]) != before:
        assert time.monotonic() < end, launched.output
        before = now
        time.sleep(0.5)


def kill_the_busy_shard(launched: Launched, killed: list[int]) -> None:
    """Once tokens come: of the one request, so the other shard is idle."""
    shards = [launched.shard(index) for index in range(2)]
    before = [cpu_ticks(pid) for pid in shards]
    until_tokens(launched.url, 40)
    busy = max(range(2), key=lambda index: cpu_ticks(shards[index]) - before[index])
    os.kill(shards[busy], signal.SIGKILL)
    killed.append(busy)


def is_complete(spans: list[Span]) -> bool:
    return any(span.kind == Span.SPAN_KIND_SERVER for span in spans)


@pytest.mark.long
def test_a_trace_covers_http_to_step_across_a_lost_replica(replicas: Replicas) -> None:
    launched = replicas.launched
    until_idle(launched)
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    killed: list[int] = []
    killer = threading.Thread(target=kill_the_busy_shard, args=(launched, killed))
    killer.start()
    parameters = {"max_new_tokens": NUM_TOKENS, "adapter_id": "json", "ignore_eos_token": True, "details": True}
    body = {"inputs": "Record:\n", "parameters": parameters | {"speculative_tokens": 0}}
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "x-request-id": "traced-one"}
    answer = httpx.post(f"{launched.url}/generate", json=body, headers=headers, timeout=120)
    killer.join()
    assert answer.status_code == 200, answer.text
    assert answer.json()["details"]["generated_tokens"] == NUM_TOKENS

    spans = replicas.collector.trace(trace_id, is_complete)
    assert replicas.collector.services == {"lorikeet.router"}
    [top] = [span for span in spans if span.parent_span_id.hex() == parent_id]
    found = values(top.attributes)
    assert top.name == "text_completion json"
    assert (found["http.response.status_code"], found["lorikeet.request_id"]) == (200, "traced-one")
    assert (found["gen_ai.usage.output_tokens"], found["lorikeet.retries"]) == (NUM_TOKENS, 1)
    assert found["gen_ai.latency.e2e"] > found["gen_ai.latency.time_to_first_token"] > 0
    below = [span for span in spans if span is not top]
    assert {span.parent_span_id for span in below} == {top.span_id}
    names = [span.name for span in below]
    assert names[names.index("queue") :] == ["queue", "dispatch", "queue", "dispatch"]
    lost, resumed = (span for span in below if span.name == "dispatch")
    assert values(lost.attributes)["lorikeet.shard"].endswith(f"/shard-{killed[0]}.sock")
    assert values(lost.attributes)["lorikeet.outcome"] == "retried"
    assert values(resumed.attributes)["lorikeet.shard"].endswith(f"/shard-{1 - killed[0]}.sock")
    assert values(resumed.attributes)["lorikeet.attempt"] == 2
    for span in (lost, resumed):
        assert sum(values(event.attributes)["lorikeet.step.tokens"] for event in span.events) > 0
    steps = [values(event.attributes) for span in (lost, resumed) for event in span.events]
    assert sum(step["lorikeet.step.tokens"] for step in steps) == NUM_TOKENS
    until_back(launched, killed[0])

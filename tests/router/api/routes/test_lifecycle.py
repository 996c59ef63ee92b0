"""The life of a request: probes, draining, overload, time limits, disconnects, ids, CORS, logs."""

import asyncio
import itertools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import tokenizers

from lorikeet.router.text.tokenizer import SHORT_TEXT
from tests.router.scripted_shard import Script, ScriptedShard
from tests.router.serving import MODEL_ID, Serving, serving, write_model_folder

pytestmark = pytest.mark.anyio

CHAT = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]}
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "Hi"}),
    ("/generate_stream", {"inputs": "Hi"}),
    ("/", {"inputs": "Hi"}),
    ("/generate", {"inputs": "Hi", "parameters": {"best_of": 2, "do_sample": True}}),
    ("/v1/completions", {"model": MODEL_ID, "prompt": ["Hi", "Ho"], "n": 2}),
    ("/v1/completions", {"model": MODEL_ID, "prompt": "Hi", "stream": True}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "n": 3}),
]


async def test_probes_of_a_ready_server(server: Serving) -> None:
    server.says("x")
    for path in ("/", "/health", "/ping", "/ready", "/startup"):
        response = await server.client.get(path)
        assert (response.status_code, response.content) == (200, b""), path
    assert len(server.shard.submits) == 1, "/startup alone generates"
    assert server.shard.submits[0].max_new_tokens == 1


async def test_probes_and_requests_without_a_shard(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, connected=False) as server:
        for path in ("/", "/health", "/ping", "/ready", "/startup"):
            response = await server.client.get(path)
            assert response.status_code == 503
            assert response.json() == {"error": "unhealthy", "error_type": "healthcheck"}
        response = await server.client.post("/generate", json={"inputs": "Hi"})
        assert (response.status_code, response.json()["error_type"]) == (503, "unavailable")
        response = await server.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")


async def test_startup_probes_share_one_generation(server: Serving) -> None:
    server.says("a", step_seconds=0.5)
    server.shard.submits.clear()
    answers = await asyncio.gather(*(server.client.get(path) for path in ("/startup", "/health_generate") * 20))
    assert {answer.status_code for answer in answers} == {200}
    assert len(server.shard.submits) <= 3
    assert (await server.client.get("/startup")).status_code == 200, "a later one generates again"


async def test_a_startup_probe_outlives_the_client_that_began_it(server: Serving) -> None:
    server.says("a", step_seconds=0.3)
    with pytest.raises(httpx.ReadTimeout):
        await server.client.get("/startup", timeout=0.1)
    assert (await server.client.get("/startup")).status_code == 200


async def test_a_shard_that_fails_a_startup_probe(server: Serving) -> None:
    server.says("x", error="broken")
    response = await server.client.get("/startup")
    assert (response.status_code, response.json()["error"]) == (503, "unhealthy")


async def test_draining_rejects_new_requests_and_finishes_running_ones(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        server.says("abcdefgh", step_seconds=0.1)
        running = asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        draining = asyncio.create_task(server.dispatcher.drain(10))
        await server.shard.until(lambda: server.dispatcher.draining)
        for path, body in GENERATING:
            response = await server.client.post(path, json=body)
            assert response.status_code == 503
            assert response.headers["connection"] == "close"
        for path in ("/ready", "/startup"):
            assert (await server.client.get(path)).status_code == 503
        assert (await server.client.get("/health")).status_code == 200
        assert (await running).json() == {"generated_text": "abcdefgh"}
        assert await draining


async def test_a_running_request_that_outlasts_the_drain_ends_with_an_error(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        server.says("ab", hangs=True)
        whole = asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        assert not await server.dispatcher.drain(0.05)
        assert (await whole).status_code == 503


async def test_a_running_stream_that_outlasts_the_drain_ends_with_an_error(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        server.says("ab", hangs=True)
        stream = asyncio.create_task(server.events("/generate_stream", {"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        assert not await server.dispatcher.drain(0.05)
        assert (await stream)[-1]["error_type"] == "shutting_down"


async def test_overload(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, max_concurrent_requests=1) as server:
        server.says("ab", hangs=True)
        first = asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        expected = {"error": "Model is overloaded", "error_type": "overloaded"}
        response = await server.client.post("/generate", json={"inputs": "Hi"})
        assert (response.status_code, response.json()) == (429, expected)
        assert int(response.headers["retry-after"]) >= 1
        assert await server.events("/generate_stream", {"inputs": "Hi"}) == [expected]
        response = await server.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) >= 1
        first.cancel()
        await server.idle()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_requests_that_are_rejected_are_not_tokenized(tmp_path: Path, anyio_backend: str, path: str) -> None:
    """At most as many texts are tokenized as requests could be accepted. Short ones do not wait for a thread."""
    async with serving(tmp_path, max_concurrent_requests=3) as server:
        server.says("ab", hangs=True)
        first = asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        pool = server.dispatcher._tokenizer.pool
        blocked, most, run = threading.Event(), [], pool.run

        async def counted(work: Callable[[], Any], caller: str, num_chars: int) -> Any:
            most.append(pool.num_pending)
            return await run(lambda: (blocked.wait(30), work())[1], caller, num_chars)

        pool.run = counted  # type: ignore[method-assign]
        text = "Hi" * SHORT_TEXT
        body = {"inputs": text, "prompt": text, "model": MODEL_ID, "messages": [{"role": "user", "content": text}]}
        flood = [asyncio.create_task(server.client.post(path, json=body)) for _ in range(20)]
        statuses = []
        for refused in itertools.islice(asyncio.as_completed(flood), 18):
            statuses.append((await refused).status_code)
        assert (statuses, len(most)) == ([429] * 18, 2)
        blocked.set()
        await server.shard.until(lambda: server.shard.num_running == 3)
        for task in (first, *flood):
            task.cancel()
        await server.idle()


async def test_a_group_is_queued_completely_or_not_at_all(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, max_concurrent_requests=2) as server:
        server.says("ab", hangs=True)
        first = asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        response = await server.client.post("/v1/completions", json={"model": MODEL_ID, "prompt": "Hi", "n": 2})
        assert response.status_code == 429
        assert server.dispatcher.num_active == 1
        first.cancel()
        await server.idle()


async def test_time_limit(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, request_timeout_s=0.1) as server:
        server.says("ab", hangs=True)
        expected = {"error": "Request exceeded the time limit", "error_type": "timeout"}
        response = await server.client.post("/generate", json={"inputs": "Hi"})
        assert (response.status_code, response.json()) == (504, expected)
        assert (await server.events("/generate_stream", {"inputs": "Hi"}))[-1] == expected
        response = await server.client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        await server.idle()


async def test_time_limit_in_the_queue(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, max_queue_seconds=0.1) as server:
        server.shard.credit_requests = 1
        server.says("ab", hangs=True)
        first = asyncio.create_task(server.client.post("/generate", json={"inputs": "Hi"}))
        await server.shard.until(lambda: server.shard.num_running == 1)
        response = await server.client.post("/generate", json={"inputs": "Hi"})
        assert (response.status_code, response.json()["error_type"]) == (429, "overloaded")
        assert "retry-after" in response.headers
        first.cancel()
        await server.idle()


@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_a_disconnect_frees_everything(server: Serving, path: str, body: dict[str, Any]) -> None:
    server.says("ab", hangs=True)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        request = asyncio.create_task(client.post(path, json=body))
        await server.shard.until(lambda: server.shard.num_running > 0)
        await asyncio.sleep(0.05)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await server.idle()
    assert sorted(server.shard.abort_ids) == sorted(submit.id for submit in server.shard.submits)
    assert server.metrics.request_failure.values["dropped"] > 0


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_disconnect_with_a_request_behind_frees_everything(server: Serving, path: str) -> None:
    """Pipelined requests, as in a flood of connections that close at once."""
    server.says("ab", hangs=True)
    body = b'{"inputs":"Hi"}'
    fields = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    request = b"POST %b HTTP/1.1\r\n%b\r\n%b" % (path.encode(), fields, body)
    for number in range(1, 21):
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)
        writer.write(request + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        # each its own: a request that starts after `idle` would run in the next test
        await server.shard.until(lambda: len(server.shard.submits) == number)  # noqa: B023 - awaited here
        writer.close()
    await server.idle()
    assert sorted(server.shard.abort_ids) == sorted(submit.id for submit in server.shard.submits)


async def test_a_disconnect_between_events(server: Serving) -> None:
    server.says("a" * 1000, step_seconds=0.005)
    body = {"inputs": "Hi"}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=120) as client,
        client.stream("POST", "/generate_stream", json=body) as response,
    ):
        async for _ in response.aiter_bytes():
            break
    await server.idle()
    assert server.shard.abort_ids == [server.shard.submits[0].id]


async def test_request_ids(server: Serving) -> None:
    server.says("x")
    for path, body in GENERATING:
        response = await server.client.post(path, json=body, headers={"x-request-id": "my-id_1.2:3"})
        assert response.headers["x-request-id"] == "my-id_1.2:3"
    response = await server.client.get("/nope", headers={"x-request-id": "bad id\t<b>" + "x" * 500})
    assert response.headers["x-request-id"] == ("badidb" + "x" * 500)[:128]
    made = {(await server.client.get("/health")).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(len(identity) == 32 for identity in made)
    response = await server.client.post("/generate", content=b"{", headers={"content-type": "application/json"})
    assert response.headers["x-request-id"]


async def test_cors_defaults(server: Serving) -> None:
    """Origins of loopback, with any header: OpenAI's package sends a dozen of its own."""
    asks = {
        "origin": "http://localhost:5173",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization, x-stainless-os",
    }
    response = await server.client.options("/generate", headers=asks)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == asks["origin"]
    assert "GET" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == asks["access-control-request-headers"]


async def test_every_answer_to_a_browser_has_cors_headers(tmp_path: Path, anyio_backend: str) -> None:
    origin = {"origin": "https://a.example"}
    async with serving(tmp_path, cors_allow_origin=("*",)) as server:
        answers = [await server.client.get(path, headers=origin) for path in ("/health", "/nope", "/generate", "/info")]
        answers.append(await server.client.post("/generate", content=b"{", headers=origin))
        server.dispatcher.submit = _broken  # type: ignore[method-assign]
        answers.append(await server.client.post("/generate", json={"inputs": "Hi"}, headers=origin))
        await server.dispatcher.drain(0)
        answers.append(await server.client.post("/generate", json={"inputs": "Hi"}, headers=origin))
    assert [answer.status_code for answer in answers] == [200, 404, 405, 200, 415, 500, 503]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


async def test_no_origin_gets_credentials_unless_it_is_listed(tmp_path: Path, anyio_backend: str) -> None:
    for origins in ((), ("*",), ("https://a.example", "*")):
        with pytest.raises(ValueError, match="cors_allow_origin"):
            async with serving(tmp_path, cors_allow_origin=origins, cors_allow_credentials=True):
                pass


async def test_cors_configuration(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(
        tmp_path,
        cors_allow_origin=("https://a.example",),
        cors_allow_method=("POST",),
        cors_allow_header=("x-mine",),
        cors_expose_header=("x-request-id",),
        cors_allow_credentials=True,
    ) as server:
        response = await server.client.get("/health", headers={"origin": "https://a.example"})
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert response.headers["access-control-allow-credentials"] == "true"
        assert response.headers["access-control-expose-headers"] == "x-request-id"
        response = await server.client.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "Origin"
        assert (await server.client.get("/health")).headers["vary"] == "Origin"


@pytest.mark.parametrize("path", ["/generate/", "//generate", "/generate//", "///generate/"])
async def test_more_slashes_than_needed(server: Serving, path: str) -> None:
    server.says("x")
    response = await server.client.post(server.url + path, json={"inputs": "Hi"})
    assert (response.status_code, response.json()) == (200, {"generated_text": "x"})


async def test_slashes_of_other_routes(server: Serving) -> None:
    models = ("/v1/models/", "/v1//models", "//v1/models", f"/v1/models/{MODEL_ID}/")
    for path in (*models, "/health/", "//health", "/docs/"):
        assert (await server.client.get(server.url + path)).status_code == 200, path
    response = await server.client.get("/v1/models//absolute/path")
    assert response.json()["error"]["message"] == "The model `/absolute/path` does not exist"


async def test_the_methods_of_a_path(server: Serving) -> None:
    reads = "GET, HEAD, OPTIONS"
    for path, methods in (("/generate", "OPTIONS, POST"), ("/", f"{reads}, POST"), ("/health", reads)):
        response = await server.client.put(path)
        assert (response.status_code, response.headers["allow"]) == (405, methods)
        response = await server.client.options(path)
        assert (response.status_code, response.headers["allow"]) == (204, methods)
    assert (await server.client.options("/nope")).status_code == 404


async def test_log_lines_have_the_client_address(tmp_path: Path, anyio_backend: str) -> None:
    forwarded = {"x-forwarded-for": "203.0.113.7"}
    shown = {}
    for name, fields in {
        "plain": {},
        "proxy": {"trusted_proxies": ("127.0.0.1/32",)},
        "hashed": {"trusted_proxies": ("127.0.0.1/32",), "hash_client_addresses": True},
    }.items():
        async with serving(tmp_path / name, **fields) as server:
            server.says("x")
            with structlog.testing.capture_logs() as lines:
                for _ in range(2):
                    await server.client.post("/generate", json={"inputs": "Hi"}, headers=forwarded)
            shown[name] = {line["client"] for line in lines if line["event"] == "request"}
    assert shown["plain"] == {"127.0.0.1"} and shown["proxy"] == {"203.0.113.7"}
    [hashed] = shown["hashed"]
    assert len(hashed) == 16 and hashed != "203.0.113.7"


async def test_a_slow_body_while_draining_is_503(tmp_path: Path, anyio_backend: str) -> None:
    """The server cancels what is not complete at its end."""
    async with serving(tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)
        fields = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
        writer.write(b"POST /generate HTTP/1.1\r\n" + fields + b"\r\n")
        await server.shard.until(lambda: len(server.server.server_state.tasks) == 1)
        [task] = server.server.server_state.tasks
        task.cancel()
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in answer
        writer.close()


async def test_counts(server: Serving) -> None:
    metrics = server.metrics

    def counted() -> tuple[float, float, dict[str, float]]:
        return (
            metrics.request_count.values.get("", 0),
            metrics.request_success.values.get("", 0),
            dict(metrics.request_failure.values),
        )

    count, success, failures = counted()
    server.says("x")
    await server.client.post("/generate", json={"inputs": "Hi"})
    await server.client.post("/generate", json={"inputs": ""})
    await server.events("/generate_stream", {"inputs": ""})
    await server.client.get("/health")
    after = counted()
    assert after[:2] == (count + 3, success + 1)
    assert after[2]["validation"] == failures.get("validation", 0) + 2


async def test_neither_prompts_nor_outputs_are_logged(tmp_path: Path, anyio_backend: str) -> None:
    """A separate router process with the most verbose log level."""
    shard = ScriptedShard(tmp_path, lambda submit: Script([]))
    model_folder = write_model_folder(tmp_path / "model")
    settings = {
        "model_id": MODEL_ID,
        "model_path": str(model_folder),
        "shard_addresses": [shard.address],
        "hostname": "127.0.0.1",
        "port": 0,
        "json_output": True,
        "log_level": "debug",
    }
    (tmp_path / "router.json").write_text(json.dumps(settings))
    backend = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    shard.answer = lambda submit: Script(backend.encode("CANARY-OUT").ids)
    log_path = tmp_path / "router.log"
    async with shard:
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lorikeet.router", str(tmp_path / "router.json"), stdout=log, stderr=log
            )
        try:
            await shard.until(lambda: "shard_connected" in log_path.read_text())
            lines = [json.loads(line) for line in log_path.read_text().splitlines()]
            port = next(line["port"] for line in lines if line["event"] == "router_listening")
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                for _ in range(600):  # connected, and perhaps not ready yet
                    if (await client.get("/ready")).status_code == 200:
                        break
                    await asyncio.sleep(0.1)
                num_sent = await _send_canaries(client)
        finally:
            process.terminate()
            assert await process.wait() == 0
    logged = log_path.read_text()
    assert "CANARY" not in logged
    requests = [line for line in map(json.loads, logged.splitlines()) if line["event"] == "request"]
    requests = [line for line in requests if line["path"] != "/ready"]
    assert len(requests) == num_sent
    assert {line["request_id"] for line in requests} == {"seen-id"}
    assert any(line.get("generated_tokens") == len("CANARY-OUT") for line in requests)
    assert {line["process"] for line in requests} == {"router"}
    rejected = [line for line in requests if line["status"] >= 400]
    assert {line["reason"] for line in rejected} == {"not_json", "wrong_json_type", "validation_error"}
    assert not any("reason" in line for line in requests if line["status"] < 400)


async def _send_canaries(client: httpx.AsyncClient) -> int:
    """Send valid, broken and mistyped requests to every route; returns their number."""
    headers = {"content-type": "application/json", "authorization": "Bearer CANARY-KEY", "x-request-id": "seen-id"}
    num_sent = 0
    for path, body in [*GENERATING, ("/tokenize", {"inputs": "Hi"})]:
        good = json.dumps(body).replace('"Hi"', '"CANARY-IN"')
        statuses = []
        for sent in (good, good.replace('"CANARY-IN"', '"CANARY-IN'), good.replace('"CANARY-IN"', '{"CANARY": 1}')):
            response = await client.post(f"{path}?q=CANARY-QUERY", content=sent, headers=headers)
            statuses.append(response.status_code)
        assert statuses[0] == 200 and all(400 <= status < 500 for status in statuses[1:]), (path, statuses)
        num_sent += 3
    return num_sent


async def test_a_bug_in_a_route_is_logged_without_the_prompt(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        server.dispatcher.submit = _broken  # type: ignore[method-assign]
        with structlog.testing.capture_logs() as lines:
            response = await server.client.post("/generate", json={"inputs": "CANARY"})
            assert (response.status_code, response.json()["error_type"]) == (500, "internal")
            response = await server.client.post("/v1/chat/completions", json=CHAT)
            assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    broken = [line for line in lines if line["event"] == "unhandled_exception"]
    assert [line["kind"] for line in broken] == ["RuntimeError", "RuntimeError"]
    assert any("native.py" in frame for frame in broken[0]["where"])
    assert "CANARY" not in str(lines)


def _broken(request: Any, **_: Any) -> Any:
    raise RuntimeError(f"CANARY {request}")


async def test_requests_with_an_origin_get_the_same_answers(server: Serving) -> None:
    server.says("abc")
    for path, body in GENERATING:
        for sent in (body, {}, {**body, "inputs": "", "n": 0}):
            short = await server.client.post(path, json=sent)
            long = await server.client.post(path, json=sent, headers={"origin": server.url})
            assert long.status_code == short.status_code
            assert long.headers["access-control-allow-origin"] == server.url
            assert long.headers["content-type"] == short.headers["content-type"]
            assert set(short.headers) <= set(long.headers)
            if path == "/generate_stream" or short.status_code >= 400:
                assert long.text == short.text


async def test_requests_of_lower_priority_value_are_sent_first(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path) as server:
        for path, body in (("/generate", {"inputs": "Hi"}), ("/v1/chat/completions", CHAT)):
            server.shard.submits.clear()
            server.shard.credit_requests = 1
            server.says("x", hangs=True)
            tasks = [asyncio.create_task(server.client.post(path, json=body))]
            await server.shard.until(lambda: server.shard.num_running == 1)
            server.says("x")
            for seed, priority in enumerate([5, None, -5, 5, -5]):
                fields = {"priority": priority, "seed": seed}
                sent = {**body, "parameters": fields} if path == "/generate" else {**body, **fields}
                tasks.append(asyncio.create_task(server.client.post(path, json=sent)))
                await server.shard.until(lambda: server.dispatcher.num_active == len(tasks))  # noqa: B023
            tasks[0].cancel()
            assert {task.status_code for task in await asyncio.gather(*tasks[1:])} == {200}
            assert [submit.seed for submit in server.shard.submits[1:]] == [2, 4, 1, 0, 3]

"""What pages of other sites may do: origins that may read answers, names in `Host`, and what requests may load."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.keys import sha256
from lorikeet.router.api.access import host_name
from tests.router.serving import Serving, serving

pytestmark = pytest.mark.anyio

HOSTILE = "https://hostile.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
KEYS: dict[str, Any] = {"api_keys_sha256": (sha256("secret"),)}


@pytest.fixture(scope="module")
async def server(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("serving"), adapters=True) as started:
        started.adapter("one")
        yield started


@pytest.fixture
def own(server: Serving) -> str:
    """The server's own origin."""
    return server.url


async def readers(server: Serving, *origins: str, **headers: str) -> set[str]:
    """Those of the origins that may read answers and send requests with JSON."""
    readers = set()
    for origin in origins:
        sent = {"origin": origin, **headers}
        answers = [await server.client.get("/v1/models", headers=sent)]
        answers.append(await server.client.options("/generate", headers=sent | PREFLIGHT))
        allowed = {answer.headers.get("access-control-allow-origin") in ("*", origin) for answer in answers}
        assert len(allowed) == 1 and answers[0].status_code == 200, answers
        assert answers[1].status_code == (200 if allowed == {True} else 400)
        if allowed == {True}:
            readers.add(origin)
    return readers


async def test_without_keys_only_this_server_and_loopback_may_read(server: Serving, own: str) -> None:
    allowed = (own, "http://localhost:5173", "https://127.0.0.1", "http://[::1]:80", "http://127.1.2.3:9")
    refused = (HOSTILE, "null", "http://localhost.hostile.example", "http://127.0.0.1.hostile.example", "file://",
               "http://xlocalhost", "http://192.0.2.1:3000", "chrome-extension://abc")  # fmt: skip
    assert await readers(server, *allowed, *refused) == set(allowed)
    answer = await server.client.get("/health", headers={"origin": HOSTILE})
    assert answer.headers["vary"] == "Origin"


async def test_with_keys_any_origin_may_read(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, **KEYS) as server:
        assert await readers(server, HOSTILE, "null", authorization="Bearer secret") == {HOSTILE, "null"}


async def test_optional_keys_protect_nothing(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path, keys_optional=True, **KEYS) as server:
        assert await readers(server, HOSTILE) == set()


@pytest.mark.parametrize("listed", [HOSTILE, "*"])
async def test_the_operator_may_list_origins(tmp_path: Path, anyio_backend: str, listed: str) -> None:
    async with serving(tmp_path, cors_allow_origin=(listed,)) as server:
        origins = (HOSTILE, "http://other.example")
        assert await readers(server, *origins) == (set(origins) if listed == "*" else {HOSTILE})


@pytest.mark.parametrize(
    ("host", "name"),
    [("LocalHost:80", "localhost"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("a.b.:1", "a.b"), ("", ""), ("::1", "")],
)
def test_the_name_in_a_host_field(host: str, name: str) -> None:
    assert host_name(host) == name


async def host_status(server: Serving, host: str, path: str = "/v1/models") -> int:
    answer = await server.client.get(path, headers={"host": host})
    if answer.status_code == 421:
        assert "--allowed-hosts" in answer.text
    return answer.status_code


@pytest.mark.parametrize("path", ["/v1/models", "/", "/ui", "/metrics", "/info", "/health", "/docs"])
async def test_a_name_that_resolves_to_loopback_is_refused(server: Serving, path: str) -> None:
    assert await host_status(server, "hostile.example:3000", path) == 421


async def test_names_of_loopback_and_of_the_server_are_served(server: Serving) -> None:
    for host in ("localhost", "LOCALHOST:1", "localhost.:80", "127.0.0.1:9", "127.5.5.5", "[::1]:80", "0.0.0.0:3000"):
        assert await host_status(server, host) == 200, host
    for host in ("", "localhost.hostile.example", "127.0.0.1.hostile.example", "192.0.2.1", "[2001:db8::1]", "::1"):
        assert await host_status(server, host) == 421, host


async def test_allowed_hosts(tmp_path: Path, anyio_backend: str) -> None:
    async with serving(tmp_path / "a", allowed_hosts=("Model.Example",), hostname="box.example") as server:
        for host in ("model.example:81", "BOX.example", "localhost"):
            assert await host_status(server, host) == 200
        assert await host_status(server, "other.example") == 421
    for number, fields in enumerate(({"allowed_hosts": ("*",)}, {"trusted_proxies": ("127.0.0.1/32",)}, KEYS)):
        async with serving(tmp_path / str(number), **fields) as server:
            assert await host_status(server, "other.example") in (200, 401)


async def test_an_error_of_the_host_has_the_shape_of_its_route(server: Serving) -> None:
    for path, kind in (("/generate", "error_type"), ("/v1/completions", "error"), ("/v1/messages", "request_id")):
        answer = await server.client.post(path, json={}, headers={"host": "hostile.example"})
        assert answer.status_code == 421 and kind in answer.json()


def body(name: str, source: str) -> dict[str, Any]:
    return {"inputs": "Hi", "parameters": {"max_new_tokens": 1, "adapter_id": name, "adapter_source": source}}


async def load(server: Serving, source: str, **headers: str) -> tuple[int, str]:
    """Status of a request for an adapter, and its text. Sources answer as if nothing existed."""
    name = "one" if source == "local" else "someone/adapter"
    answer = await server.client.post("/generate", json=body(name, source), headers=headers)
    return answer.status_code, answer.text


@pytest.fixture
def asked(server: Serving, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources in a network that were asked for an adapter."""
    return _recorded(server, monkeypatch)


def _recorded(server: Serving, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from lorikeet.adapters.errors import AdapterNotFound
    from lorikeet.adapters.refs import SourceKind

    asked: list[str] = []
    for source in (SourceKind.HUB, SourceKind.S3):

        async def resolve(ref: Any, token: str | None) -> Any:
            asked.append(ref.source.value)
            raise AdapterNotFound("there is no such adapter")

        monkeypatch.setattr(server.service.rights.sources[source], "resolve", resolve)
    return asked


@pytest.mark.parametrize("source", ["hub", "s3"])
async def test_a_page_of_another_site_loads_nothing_from_a_network(
    server: Serving, own: str, asked: list[str], source: str
) -> None:
    server.service.rights.forget()
    for origin in (HOSTILE, "null"):
        status, text = await load(server, source, origin=origin)
        assert (status, asked) == (403, []) and "--cors-allow-origin" in text
    merge = {"ids": ["someone/a", "someone/b"], "weights": [1, 1]}
    fields = {"inputs": "Hi", "parameters": {"merged_adapters": merge, "adapter_source": source}}
    answer = await server.client.post("/generate", json=fields, headers={"origin": HOSTILE})
    assert (answer.status_code, asked) == (403, [])
    for headers in ({}, {"origin": own}, {"origin": "http://localhost:8080"}):
        server.service.rights.forget()
        assert (await load(server, source, **headers))[0] == 404
    assert asked == [source] * 3
    assert (await load(server, "local", origin=HOSTILE))[0] == 200


async def test_a_key_or_a_listed_origin_loads_as_everybody(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path / "keys", adapters=True, s3_prefixes=None, **KEYS) as server:
        asked = _recorded(server, monkeypatch)
        assert (await load(server, "hub", origin=HOSTILE, authorization="Bearer secret"))[0] == 404
        assert asked == ["hub"]
    async with serving(tmp_path / "listed", adapters=True, cors_allow_origin=(HOSTILE, "*")) as server:
        asked = _recorded(server, monkeypatch)
        assert (await load(server, "hub", origin=HOSTILE))[0] == 404
        assert (await load(server, "hub", origin="http://other.example"))[0] == 403
        assert asked == ["hub"]


async def test_downloads_can_be_forbidden(tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, adapters=True, no_adapter_downloads=True) as server:
        asked = _recorded(server, monkeypatch)
        server.adapter("one")
        for source in ("hub", "s3"):
            status, text = await load(server, source)
            assert (status, asked) == (403, []) and "--no-adapter-downloads" in text
        assert (await load(server, "local"))[0] == 200


@pytest.mark.parametrize("path", ["/health_generate", "/startup", "/v1/live"])
async def test_a_page_of_another_site_starts_nothing_by_a_get(server: Serving, path: str) -> None:
    server.shard.submits.clear()
    for headers in ({"origin": HOSTILE}, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}):
        answer = await server.client.get(path, headers=headers)
        assert answer.status_code == 403 and "--cors-allow-origin" in answer.text
    assert not server.shard.submits


async def test_links_of_other_sites_open_the_page(server: Serving) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "accept": "text/html"}
    assert (await server.client.get("/", headers=headers)).status_code == 200
    assert (await server.client.get("/startup", headers={"sec-fetch-site": "same-origin"})).status_code == 200


async def test_the_name_that_a_trusted_proxy_was_asked_for_is_the_servers(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"trusted_proxies": ("127.0.0.1/32",)}
    async with serving(tmp_path, adapters=True, **fields) as server:
        _recorded(server, monkeypatch)
        sent = {"origin": "https://llm.example", "x-forwarded-host": "llm.example"}
        assert (await load(server, "hub", **sent))[0] == 404
        assert (await load(server, "hub", origin="https://llm.example"))[0] == 403

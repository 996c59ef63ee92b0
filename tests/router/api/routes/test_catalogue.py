"""Named adapters: aliases, their defaults, templates, weights and keys; reloads; the listing."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.adapters.keys import sha256
from lorikeet.proto import shard_pb2
from tests.hub_server import Repository, hub
from tests.router.api.routes.test_adapters import body
from tests.router.scripted_loader import digest_of, finds_all
from tests.router.serving import CHAT_TEMPLATE, MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio

KEYS = (
    f"- {{name: team-a, sha256: {sha256('secret a')}, isolate: true}}\n"
    f"- {{name: team-b, sha256: {sha256('secret b')}}}\n"
    f"- {{name: root, sha256: {sha256('secret root')}, admin: true}}\n"
)


def write(folder: Path, text: str) -> str:
    path = folder / "catalogue.yaml"
    path.write_text(text)
    return str(path)


def made(folder: Path, *names: str) -> None:
    """Adapters that exist before the server starts."""
    for name in names:
        (folder / "roots" / name).mkdir(parents=True)
        (folder / "roots" / name / "adapter_config.json").write_text("{}")
        (folder / "roots" / name / "adapter_model.safetensors").write_text(name)


def open_keys(folder: Path) -> dict[str, Any]:
    """Settings of a server that serves requests without a key too."""
    return {"keys_path": str(folder / "keys.yaml"), "keys_optional": True}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def settled(server: Serving) -> None:
    assert server.service.preloader is not None
    await server.service.preloader.settled.wait()


async def test_an_alias_is_a_model_on_every_route(tmp_path: Path) -> None:
    made(tmp_path, "v1")
    path = write(tmp_path, "support: {id: v1, parameters: {max_new_tokens: 3, temperature: 0.5, stop: [END]}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        for route in ("/generate", "/v1/completions", "/v1/chat/completions"):
            server.shard.submits.clear()
            request = body(route, "support")
            for name in ("parameters", "max_tokens"):
                request.pop(name, None)
            if route == "/generate":
                request["parameters"] = {"adapter_id": "support", "temperature": None}
            response = await server.client.post(route, json=request)
            assert response.status_code == 200, response.text
            assert response.headers["x-adapter-id"] == "support"
            (submit,) = server.shard.submits
            assert (submit.max_new_tokens, submit.sampling.temperature) == (3, 0.5)
            assert submit.adapter.id == "v1"
        override = body("/generate", "support", temperature=0.25)
        await server.client.post("/generate", json=override)
        assert (server.shard.submits[-1].max_new_tokens, server.shard.submits[-1].sampling.temperature) == (2, 0.25)
        await server.client.post("/v1/chat/completions", json=body("/v1/chat/completions", "support", max_tokens=4))
        assert server.shard.submits[-1].max_new_tokens == 4
        plain = await server.client.post("/v1/completions", json=body("/v1/completions", MODEL_ID))
        assert plain.status_code == 200 and server.shard.submits[-1].sampling.temperature == 1.0


async def test_an_alias_may_have_a_grammar_that_a_request_replaces(tmp_path: Path) -> None:
    made(tmp_path, "v1")
    path = write(tmp_path, "support: {id: v1, parameters: {response_format: {type: json_object}}}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        for route in ("/generate", "/v1/completions", "/v1/chat/completions"):
            assert (await server.client.post(route, json=body(route, "support"))).status_code == 200
            assert "json_schema" in server.shard.submits[-1].grammar.text
            replaced = body(route, "support", guided_regex="a+")
            assert (await server.client.post(route, json=replaced)).status_code == 200
            assert "a+" in server.shard.submits[-1].grammar.text
            plain = body(route, "support", response_format={"type": "text"})
            assert (await server.client.post(route, json=plain)).status_code == 200
            assert not server.shard.submits[-1].HasField("grammar")


async def test_a_roll_out_is_sticky_per_user(tmp_path: Path) -> None:
    made(tmp_path, "v1", "v2")
    path = write(tmp_path, "a: {source: local, revisions: {v1: 0.75, v2: 0.25}, weight: 2}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        ids: Counter[str] = Counter()
        for number in range(60):
            users = [
                (await server.client.post("/v1/completions", json=body("/v1/completions", "a", user=f"u{number}")))
                for _ in range(2)
            ]
            assert users[0].headers["x-adapter-digest"] == users[1].headers["x-adapter-digest"]
            ids[server.shard.submits[-1].adapter.id] += 1
        assert ids["v1"] > ids["v2"] > 4


async def test_keys(tmp_path: Path) -> None:
    made(tmp_path, "v1")
    (tmp_path / "keys.yaml").write_text(KEYS)
    path = write(tmp_path, "mine: {id: v1, keys: [team-a]}\nours: {id: v1}")
    async with serving(tmp_path, adapters=True, catalogue_path=path, **open_keys(tmp_path)) as server:
        client, request = server.client, body("/v1/completions", "mine")
        for headers, status in (
            (bearer("secret a"), 200),
            (bearer("secret root"), 200),
            (bearer("secret b"), 404),
            (bearer("other"), 404),
            ({}, 404),
        ):
            response = await client.post("/v1/completions", json=request, headers=headers)
            assert response.status_code == status, response.text
            names = [model["id"] for model in (await client.get("/v1/models", headers=headers)).json()["data"]]
            assert names == [MODEL_ID, *(["mine"] if status == 200 else []), "ours"]
            one = await client.get("/v1/models/mine", headers=headers)
            assert one.status_code == (200 if status == 200 else 404)
        # Requests of team-a share prefixes only with each other.
        for headers, salt in ((bearer("secret a"), "key:team-a"), (bearer("secret b"), "key:team-b"), ({}, "")):
            for name in ("ours", MODEL_ID):
                await client.post("/v1/completions", json=body("/v1/completions", name), headers=headers)
                assert server.shard.submits[-1].cache_salt == salt


async def test_the_server_s_keys_are_never_sent_to_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    fields: dict[str, Any] = {**open_keys(tmp_path), "admin_key_sha256": sha256("admin")}
    with hub({}) as source:
        monkeypatch.setattr(constants, "ENDPOINT", source.url)
        async with serving(tmp_path, adapters=True, adapter_source="hub", **fields) as server:
            for number, (shown, sent, expected) in enumerate(
                [
                    ("secret a", None, None),
                    ("secret a", "hf_given", "hf_given"),
                    ("admin", None, None),
                    ("hf_bearer", None, "hf_bearer"),
                    ("hf_bearer", "hf_given", "hf_given"),
                    ("secret a", "secret b", None),
                ]
            ):
                source.repositories[f"a/{number}"] = Repository({"adapter_config.json": b"{}"}, token=expected)
                request = body("/generate", f"a/{number}", api_token=sent)
                assert (await server.client.post("/generate", json=request, headers=bearer(shown))).status_code == 200
                assert set(source.tokens) == {f"Bearer {expected}" if expected else ""}
                assert server.loader.asked[-1]["token"] == expected
                source.tokens.clear()


async def test_an_unknown_name_of_one_part_is_not_looked_up_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """404 at once, with the nearest names that the caller may use."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    made(tmp_path, "v1")
    entry = "{source: local, id: v1"
    path = write(tmp_path, f"support: {entry}}}\nsales: {entry}, keys: [team-a]}}\nbroken: {{idd: x}}\n")
    fields: dict[str, Any] = {**open_keys(tmp_path), "catalogue_path": path}
    with hub({"gpt-lora": Repository({"adapter_config.json": b"{}"})}) as source:
        monkeypatch.setattr(constants, "ENDPOINT", source.url)
        async with serving(tmp_path, adapters=True, adapter_source="hub", **fields) as server:
            await settled(server)
            for route in ("/generate", "/v1/completions"):
                for name, headers, hint in (
                    ("suport", {}, "the nearest names are support."),
                    ("suport@v2", {}, "the nearest names are support."),
                    ("salse", {}, "'salse'. The hub's own is hub:salse"),
                    ("salse", bearer("secret a"), "the nearest names are sales."),
                    ("gpt-lora", {}, "'gpt-lora'. The hub's own is hub:gpt-lora"),
                ):
                    response = await server.client.post(route, json=body(route, name), headers=headers)
                    assert response.status_code == 404 and hint in response.text, response.text
                broken = await server.client.post(route, json=body(route, "broken"), headers=bearer("secret root"))
                assert broken.status_code == 422, broken.text
                missing = await server.client.post(route, json=body(route, "./v1"))
                assert missing.status_code in (404, 422) and "is a path, not a hub id" in missing.text
            assert source.requests == []
            response = await server.client.post("/generate", json=body("/generate", "hub:gpt-lora"))
            assert response.status_code == 200 and response.headers["x-adapter-id"] == "gpt-lora"


async def test_templates(tmp_path: Path) -> None:
    made(tmp_path, "bare", "jinja", "config", "same", "broken", "endless", "large")
    roots = tmp_path / "roots"
    (roots / "jinja" / "chat_template.jinja").write_text("J{{ messages[0].content }}{{ eos_token }}")
    (roots / "config" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "C{{ messages[0].role }}"}))
    (roots / "same" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (roots / "broken" / "chat_template.jinja").write_text("{{ messages[0].content.nothing.at.all }}")
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
    (roots / "endless" / "chat_template.jinja").write_text(endless)
    (roots / "large" / "chat_template.jinja").write_text("{{ 'x' * 10**10 }}")
    path = write(tmp_path, "ours: {id: jinja, chat_template: 'O{{ messages[0].content }}'}\n")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:

        async def prompt(name: str) -> str:
            response = await server.client.post("/v1/chat/completions", json=body("/v1/chat/completions", name))
            assert response.status_code == 200, response.text
            return server.backend.decode(list(server.shard.submits[-1].prompt_ids), skip_special_tokens=False)

        assert await prompt("bare") == await prompt("same") == await prompt(MODEL_ID) == "[user]Hi[assistant]"
        assert await prompt("jinja") == "JHi</s>"
        assert await prompt("config") == "Cuser"
        assert await prompt("ours") == "OHi"
        for name in ("broken", "large", "endless"):
            response = await server.client.post("/v1/chat/completions", json=body("/v1/chat/completions", name))
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"].startswith("Failed applying chat template to inputs: ")
        # The process of a failed template is replaced.
        assert await prompt("jinja") == "JHi</s>"


async def test_files_of_templates_are_bounded_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "large", "both", "plain")
    roots = tmp_path / "roots"
    large = json.dumps({"chat_template": "T", "padding": "x" * (1 << 20)})
    for name in ("large", "both"):
        (roots / name / "tokenizer_config.json").write_text(large)
    (roots / "both" / "chat_template.jinja").write_text("J{{ messages[0].content }}")
    (roots / "plain" / "tokenizer_config.json").write_text('{"chat_template": "P{{ messages[0].content }}"}')
    async with serving(tmp_path, adapters=True) as server:
        reads = []
        read = server.service.templates._read

        async def counted(pin: Any, token: str | None) -> str | None:
            reads.append(pin.id)
            await asyncio.sleep(0.1)
            return await read(pin, token)

        monkeypatch.setattr(server.service.templates, "_read", counted)

        async def ask(name: str) -> httpx.Response:
            return await server.client.post("/v1/chat/completions", json=body("/v1/chat/completions", name))

        answers = await asyncio.gather(*(ask("plain") for _ in range(6)))
        assert [answer.status_code for answer in answers] == [200] * 6
        assert len(reads) == 1
        assert (await ask("both")).status_code == 200
        answer = await ask("large")
        assert answer.status_code == 422
        assert "tokenizer_config.json" in answer.text and "1048576 bytes" in answer.text


async def test_listed_models(tmp_path: Path) -> None:
    made(tmp_path, "v1", "broken")
    path = write(tmp_path, "good: {id: v1}\nbad: {weight: 2}\nabsent: {id: v9}\nbroken: {id: broken}\n")

    async def check(call: dict[str, Any]) -> dict[str, Any]:
        if call["check"]["id"] == "broken":
            raise AdapterInvalid("its header is cut off")
        return await finds_all(call)

    async with serving(tmp_path, adapters=True, catalogue_path=path, loader_check=check) as server:
        await settled(server)
        models = {model["id"]: model for model in (await server.client.get("/v1/models")).json()["data"]}
        assert next(iter(models)) == MODEL_ID
        assert {name: model.get("problem") is not None for name, model in models.items()} == {
            MODEL_ID: False,
            "good": False,
            "bad": True,
            "absent": True,
            "broken": True,
        }
        assert "neither `id` nor `revisions`" in models["bad"]["problem"]
        assert models["broken"]["problem"] == "its header is cut off"
        assert (models["good"]["root"], models["good"]["parent"]) == ("v1", MODEL_ID)
        assert (await server.client.get("/v1/models/good")).json() == models["good"]
        ready = await server.client.get("/ready")
        assert ready.status_code == 200
        for name, status in (("good", 200), ("bad", 422), ("absent", 404)):
            response = await server.client.post("/v1/completions", json=body("/v1/completions", name))
            assert response.status_code == status, response.text


async def test_pinned_adapters_are_loaded_before_the_first_request(tmp_path: Path) -> None:
    made(tmp_path, "v1", "v2", "v3")
    path = write(tmp_path, "a: {id: v1, pin: true}\nb: {id: v2}\n")
    fields: dict[str, Any] = {"catalogue_path": path, "preloaded_adapter_ids": ("v3",)}
    async with serving(tmp_path, adapters=True, **fields) as server:
        await settled(server)
        assert {call["fetch"]["id"] for call in server.loader.asked} == {"v1", "v3"}
        digests = {digest_of(call) for call in server.loader.asked}
        assert {call["hold"] for call in server.loader.calls if "hold" in call} == digests

        def pinned() -> set[str]:
            state: dict[str, bool] = {}
            for command in server.shard.commands:
                state |= {pin.digest: pin.pinned for pin in command.pins}
            return {digest for digest, is_pinned in state.items() if is_pinned}

        await server.shard.until(lambda: pinned() == digests)
        # Others are still loaded.
        assert (await server.client.post("/generate", json=body("/generate", "b"))).status_code == 200
        write(tmp_path, "b: {id: v2, pin: true}\n")
        await server.service.reloading.reload()
        await server.shard.until(lambda: len(pinned()) == 2 and pinned() != digests)
        kept = {digest_of(call) for call in server.loader.asked if call["fetch"]["id"] in ("v2", "v3")}
        assert pinned() == kept


async def test_a_reload_is_all_or_nothing(tmp_path: Path) -> None:
    made(tmp_path, "v1", "v2", "v3")
    path = write(tmp_path, "a: {id: v1}\nbroken: {id: none}\n")
    fields: dict[str, Any] = {"catalogue_path": path, "admin_key_sha256": sha256("admin"), "auth_cache_ttl_s": 0.0}
    async with serving(tmp_path, adapters=True, **fields) as server:
        await settled(server)

        async def reload(text: str) -> tuple[int, Any]:
            write(tmp_path, text)
            response = await server.client.post("/admin/catalogue/reload", headers=bearer("admin"))
            return response.status_code, response.json()

        async def answers(name: str) -> str:
            response = await server.client.post("/generate", json=body("/generate", name))
            return server.shard.submits[-1].adapter.id if response.status_code == 200 else str(response.status_code)

        # Entries that were broken before do not block new ones.
        assert await reload("a: {id: v2}\nbroken: {id: none}\nb: {id: v3}\n") == (
            200,
            {"num_entries": 3, "num_changed": 2},
        )
        assert [await answers(name) for name in ("a", "b")] == ["v2", "v3"]
        for text, part in (
            ("a: [", "it is not YAML"),
            ("a: {id: v1}\nb: {idd: v3}\n", "unknown fields: idd"),
            ("a: {id: v1}\nc: {id: nowhere}\n", "c: there is no adapter 'nowhere'"),
            ("a: {id: v1}\na: {id: v3}\n", "given twice"),
        ):
            status, answer = await reload(text)
            assert status == 409 and part in answer["error"], answer
            assert [await answers(name) for name in ("a", "b", "c")] == ["v2", "v3", "404"]
        assert (await reload("{}"))[0] == 200
        assert [await answers(name) for name in ("a", "b")] == ["404", "404"]


async def test_a_version_switched_under_load_never_mixes(tmp_path: Path) -> None:
    made(tmp_path, "v1", "v2")
    path = write(tmp_path, "a: {id: v1}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        await settled(server)
        of_version = {}
        for name in ("v1", "v2"):
            answer = await server.client.post("/generate", json=body("/generate", name))
            of_version[answer.headers["x-adapter-digest"]] = name
        ended = asyncio.Event()
        seen: Counter[str] = Counter()

        async def ask() -> None:
            while not ended.is_set():
                answer = await server.client.post("/generate", json=body("/generate", "a"))
                assert answer.status_code == 200
                seen[of_version[answer.headers["x-adapter-digest"]]] += 1

        askers = [asyncio.create_task(ask()) for _ in range(4)]
        for number in range(20):
            write(tmp_path, f"a: {{id: v{number % 2 + 1}}}")
            await server.service.reloading.reload()
            await asyncio.sleep(0.01)
        ended.set()
        await asyncio.gather(*askers)
        assert set(seen) == {"v1", "v2"}
        by_digest = {submit.adapter.digest: submit.adapter.id for submit in server.shard.submits}
        assert by_digest == of_version


@pytest.mark.long
async def test_the_queue_shares_by_weight(tmp_path: Path) -> None:
    made(tmp_path, "v1", "v2")
    path = write(tmp_path, "heavy: {id: v1, weight: 3}\nlight: {id: v2}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        for name in ("heavy", "light"):
            await server.client.post("/generate", json=body("/generate", name))
        server.shard.submits.clear()
        server.shard.credit_requests = 2
        server.says("x" * 64, step_seconds=0.0005)
        request = {"max_new_tokens": 64}
        tasks = [
            asyncio.create_task(server.client.post("/generate", json=body("/generate", name, **request)))
            for _ in range(80)
            for name in ("heavy", "light")
        ]
        await server.shard.until(lambda: len(server.shard.submits) >= 90)
        counts = Counter(submit.adapter.id for submit in server.shard.submits[10:90])
        await asyncio.gather(*tasks)
        assert counts["v1"] / counts["v2"] == pytest.approx(3.0, abs=0.45)


async def test_metrics_show_where_each_alias_is_and_its_requests(tmp_path: Path) -> None:
    made(tmp_path, "v1")
    path = write(tmp_path, "support: {id: v1, pin: true}\nother: {id: v2}")
    async with serving(tmp_path, adapters=True, catalogue_path=path) as server:
        await settled(server)
        [(_, content)] = server.service.admission.loading.contents()
        resident = shard_pb2.AdapterState.RESIDENT
        server.shard.tell(shard_pb2.AdapterState(digest=content.digest, residency=resident))
        await server.shard.until(lambda: server.service.admission.is_resident(content.digest))
        server.says("abc", hangs=True)
        async with server.client.stream("POST", "/generate_stream", json=body("/generate", "support")) as response:
            await anext(response.aiter_lines())
            lines = (await server.client.get("/metrics")).text.splitlines()
        name = "lorikeet_adapter"
        for line in (
            f'{name}_resident{{adapter="support"}} 1.0',
            f'{name}_resident{{adapter="other"}} 0.0',
            f'{name}_running_requests{{adapter="support"}} 1.0',
            f'{name}_waiting_requests{{adapter="support"}} 0.0',
        ):
            assert line in lines

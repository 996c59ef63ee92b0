"""Names of adapters: folders of the local roots, other servers' forms, and the base model's own name."""

from pathlib import Path
from typing import Any

import pytest

from lorikeet.adapters.errors import AdapterInvalid
from lorikeet.adapters.keys import sha256
from tests.router.api.routes.test_adapters import body
from tests.router.api.routes.test_catalogue import KEYS, bearer, made, open_keys, write
from tests.router.scripted_loader import finds_all
from tests.router.serving import MODEL_ID, serving

pytestmark = pytest.mark.anyio
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


async def ids(server: Any, headers: dict[str, str] | None = None) -> list[str]:
    listed = (await server.client.get("/v1/models", headers=headers)).json()["data"]
    return [model["id"] for model in listed]


async def test_a_folder_of_a_local_root_is_found_by_its_name(tmp_path: Path) -> None:
    made(tmp_path, "support", "triage")
    (tmp_path / "roots" / "notes").mkdir()
    async with serving(tmp_path, adapters=True, adapter_source="hub") as server:
        for route in ROUTES:
            response = await server.client.post(route, json=body(route, "support"))
            assert response.status_code == 200, response.text
            assert response.headers["x-adapter-source"] == "local" and response.headers["x-adapter-id"] == "support"
        assert await ids(server) == [MODEL_ID, "support", "triage"]
        one = (await server.client.get("/v1/models/triage")).json()
        assert (one["root"], one["adapter_source"], one["problem"]) == ("triage", "local", None)
        response = await server.client.post("/generate", json=body("/generate", "suport"))
        assert response.status_code == 404 and "the nearest names are support." in response.text
        response = await server.client.post("/generate", json=body("/generate", "suport", adapter_source="local"))
        end = "there is no adapter 'suport' below the local roots of this server; the nearest names are support"
        assert response.status_code == 404 and response.json()["error"].endswith(end)
        response = await server.client.post("/generate", json=body("/generate", "support", adapter_source="hub"))
        assert response.status_code != 200


async def test_an_adapter_that_changes_nothing_is_listed_with_a_warning(tmp_path: Path) -> None:
    made(tmp_path, "empty", "sound")

    async def answer(call: dict[str, Any]) -> dict[str, Any]:
        return {**await finds_all(call), "changes_nothing": call["fetch"]["id"] == "empty"}

    async with serving(tmp_path, adapters=True) as server:
        server.loader.answer = answer
        for name in ("empty", "sound"):
            assert (await server.client.post("/generate", json=body("/generate", name))).status_code == 200
        listed = (await server.client.get("/v1/models")).json()["data"]
        warnings = {model["id"]: model.get("warning") for model in listed}
        assert warnings.pop("empty") == "it changes nothing: it answers as the base model"
        assert warnings == {MODEL_ID: None, "sound": None}


async def test_a_closed_folder_has_no_name_for_others(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(KEYS)
    made(tmp_path, "secret", "open")
    path = write(tmp_path, "sales: {source: local, id: secret, keys: [team-a]}\n")
    fields = {**open_keys(tmp_path), "catalogue_path": path}
    async with serving(tmp_path, adapters=True, adapter_source="hub", **fields) as server:
        assert await ids(server) == [MODEL_ID, "open"]
        assert await ids(server, bearer("secret a")) == [MODEL_ID, "sales", "open"]
        closed = await server.client.post("/generate", json=body("/generate", "secret"))
        absent = await server.client.post("/generate", json=body("/generate", "sacred"))
        assert closed.status_code == absent.status_code == 404
        assert closed.text.replace("secret", "sacred") == absent.text
        own = await server.client.post("/generate", json=body("/generate", "secret"), headers=bearer("secret a"))
        assert own.status_code == 200


@pytest.mark.parametrize("route", ROUTES[1:])
async def test_sglangs_form_of_a_name_is_understood(route: str, tmp_path: Path) -> None:
    made(tmp_path, "support")
    path = write(tmp_path, "help: {source: local, id: support, parameters: {max_new_tokens: 3}}")
    async with serving(tmp_path, adapters=True, adapter_source="hub", catalogue_path=path) as server:
        for name in ("support", "help"):
            request = {**body(route, f"{MODEL_ID}:{name}")}
            response = await server.client.post(route, json=request)
            assert response.status_code == 200 and response.headers["x-adapter-id"] == name, response.text
        response = await server.client.post(route, json=body(route, f"{MODEL_ID}:absent"))
        assert response.status_code == 404


@pytest.mark.parametrize("field", ["lora_request", "lora_adapter", "lora_name", "LoRA"])
@pytest.mark.parametrize("route", ROUTES[1:])
async def test_other_fields_for_adapters_are_rejected_with_their_name(route: str, field: str, tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True) as server:
        response = await server.client.post(route, json={**body(route, MODEL_ID), field: "support"})
        assert response.status_code in (400, 422) and field in response.text and "adapter_id" in response.text
        response = await server.client.post(route, json={**body(route, MODEL_ID), field: None})
        assert response.status_code == 200


async def test_other_fields_for_adapters_next_to_parameters_are_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path, adapters=True) as server:
        response = await server.client.post("/generate", json={"inputs": "Hi", "lora_request": "support"})
        assert response.status_code == 422 and "`lora_request`" in response.text
        response = await server.client.post("/generate", json={"inputs": "Hi", "lora_request": None, "loras": []})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"lora": [{"id": "none"}]}, "lora", "there is no adapter 'none'"),
        ({"lora": [{"id": MODEL_ID}]}, "lora", "Base model adapter cannot be merged."),
        ({"lora": [{"id": "one"}]}, "lora", "its rank is a lie"),
        ({"lora": [{"id": ""}]}, "lora[0].id", "`lora[0].id` must have at least 1 character"),
        ({"lora": [{"id": "one"}] * 33}, "lora", "`lora` must have at most 32 items"),
        ({"lora": [{"id": "one", "scale": -2e6}]}, "lora[0].scale", "`lora[0].scale` must be >= -1000000.0"),
        ({"merged_adapters": {"ids": ["one"], "weights": [1]}}, "merged_adapters", "its rank is a lie"),
        ({"merged_adapters": {"ids": ["one"], "weights": [2e6]}}, "merged_adapters.weights[0]", "or equal to 1000000"),
    ],
)
async def test_errors_of_sums_name_the_field(
    fields: dict[str, Any], param: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(call: dict[str, Any]) -> dict[str, Any]:
        raise AdapterInvalid("its rank is a lie")

    made(tmp_path, "one")
    async with serving(tmp_path, adapters=True) as server:
        monkeypatch.setattr(server.loader, "answer", refuses)
        response = await server.client.post("/v1/completions", json={**body("/v1/completions", MODEL_ID), **fields})
        error = response.json()["error"]
        assert 400 <= response.status_code < 500 and error["param"] == param, response.text
        assert text in error["message"]


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"density": 0.5}, "density"),
        ({"density": 0.0, "majority_sign_method": "total"}, None),
        ({"merge_strategy": "cat", "majority_sign_method": "frequency"}, "majority_sign_method"),
        ({"merge_strategy": "ties", "density": 0.5, "majority_sign_method": "frequency"}, None),
    ],
)
async def test_parameters_of_other_strategies_are_named_as_ignored(
    fields: dict[str, Any], ignored: str | None, tmp_path: Path
) -> None:
    made(tmp_path, "one")
    async with serving(tmp_path, adapters=True) as server:
        merged = {"ids": ["one"], "weights": [1], **fields}
        response = await server.client.post("/generate", json=body("/generate", None, merged_adapters=merged))
        assert response.status_code == 200, response.text
        path = None if ignored is None else f"parameters.merged_adapters.{ignored}"
        assert response.headers.get("x-ignored-fields") == path


@pytest.mark.parametrize("route", ROUTES[1:])
async def test_llama_cpps_scales_are_a_sum_of_adapters(route: str, tmp_path: Path) -> None:
    made(tmp_path, "one", "two")
    async with serving(tmp_path, adapters=True) as server:
        scaled = [{"id": "one", "scale": 0.5}, {"id": "two", "scale": 2}, {"id": "off", "scale": 0}]
        response = await server.client.post(route, json={**body(route, MODEL_ID), "lora": scaled})
        assert response.status_code == 200, response.text
        merge = server.loader.asked[-1]["merge"]
        assert [pin["id"] for pin in merge["pins"]] == ["one", "two"]
        assert (merge["weights"], merge["strategy"]) == ([0.5, 2.0], "cat")
        response = await server.client.post(route, json={**body(route, MODEL_ID), "lora": []})
        assert response.status_code == 200 and "x-adapter-id" not in response.headers
        both = {**body(route, MODEL_ID), "lora": scaled, "adapter_id": "one"}
        response = await server.client.post(route, json=both)
        assert response.status_code in (400, 422) and "`lora`" in response.text
        response = await server.client.post(route, json={**body(route, MODEL_ID), "lora": [{"id": 0}]})
        assert response.status_code in (400, 422) and "lora" in response.text


async def test_the_base_models_name_may_be_an_adapters_if_the_operator_allows_it(tmp_path: Path) -> None:
    made(tmp_path, "trained")
    load = {"lora_name": MODEL_ID, "lora_path": "trained"}
    admin = {"admin_key_sha256": sha256("admin")}
    async with serving(tmp_path, adapters=True, **admin) as server:
        response = await server.client.post("/v1/load_lora_adapter", json=load, headers=bearer("admin"))
        assert response.status_code in (400, 422) and "--allow-base-model-name" in response.text
    async with serving(tmp_path, adapters=True, allow_base_model_name=True, **admin) as server:
        route = "/v1/completions"
        assert "x-adapter-id" not in (await server.client.post(route, json=body(route, MODEL_ID))).headers
        response = await server.client.post("/v1/load_lora_adapter", json=load, headers=bearer("admin"))
        assert response.status_code == 200, response.text
        assert (await server.client.post(route, json=body(route, MODEL_ID))).headers["x-adapter-id"] == MODEL_ID
        assert "x-adapter-id" not in (await server.client.post(route, json=body(route, "__base_model__"))).headers
        server.service.selection.directory.remove(MODEL_ID)
        assert "x-adapter-id" not in (await server.client.post(route, json=body(route, MODEL_ID))).headers

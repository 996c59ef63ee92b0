"""The routes to embedding and classification models, with a shard whose values are known."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorikeet.proto.shard_pb2 import PooledModel
from lorikeet.router.api.routes.pooled import typed
from lorikeet.router.schemas.pooled import CohereEmbedRequest
from tests.router.scripted_shard import pooled_values
from tests.router.serving import MODEL_ID, Serving, serving

pytestmark = pytest.mark.anyio
SIZE = 3


@asynccontextmanager
async def pooled(folder: Path, task: str, **fields: Any) -> AsyncIterator[Serving]:
    values = {"pooling": "mean", "size": SIZE, "is_encoder": True, "is_whole": True, **fields}
    async with serving(folder, pooled_model=PooledModel(task=task, **values)) as server:
        yield server


@pytest.fixture(scope="module")
async def embedder(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with pooled(tmp_path_factory.mktemp("embedder"), "embed") as server:
        yield server


@pytest.fixture(scope="module")
async def classifier(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with pooled(tmp_path_factory.mktemp("classifier"), "classify") as server:
        yield server


async def vectors(server: Serving, texts: Any, **fields: Any) -> list[Any]:
    response = await server.client.post("/v1/embeddings", json={"model": MODEL_ID, "input": texts, **fields})
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


def wanted(server: Serving, text: str) -> list[float]:
    return pooled_values(server.ids(text), SIZE)


async def test_texts_and_ids_keep_their_order(embedder: Serving) -> None:
    texts = [f"text {index}" for index in range(40)]
    embeddings = await vectors(embedder, texts)
    assert embeddings == [wanted(embedder, text) for text in texts]
    assert await vectors(embedder, [embedder.ids(text) for text in texts]) == embeddings
    assert await vectors(embedder, embedder.ids("text 0")) == embeddings[:1]


async def test_base64_is_of_the_same_numbers(embedder: Serving) -> None:
    [text] = await vectors(embedder, "Rome", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == wanted(embedder, "Rome")


async def test_fewer_dimensions_have_length_one(embedder: Serving) -> None:
    [embedding] = await vectors(embedder, "Rome", dimensions=2)
    first = np.array(wanted(embedder, "Rome")[:2])
    assert embedding == pytest.approx((first / np.linalg.norm(first)).tolist(), abs=1e-6)


async def test_every_token_has_a_vector(embedder: Serving) -> None:
    ids = embedder.ids("Rome?")
    body = {"input": ["Rome?", "a"], "task": "token_embed"}
    answer = (await embedder.client.post("/pooling", json=body)).json()
    first, second = (entry["data"] for entry in answer["data"])
    assert first == [pooled_values([token_id], SIZE) for token_id in ids]
    assert second == [wanted(embedder, "a")]
    answer = (await embedder.client.post("/pooling", json={"input": "Rome?", "task": "embed"})).json()
    assert answer["data"][0]["data"] == wanted(embedder, "Rome?")


async def test_every_token_has_scores(classifier: Serving) -> None:
    body = {"input": "Rome?", "task": "token_classify", "use_activation": False}
    answer = (await classifier.client.post("/pooling", json=body)).json()
    assert answer["data"][0]["data"] == [pooled_values([token_id], SIZE) for token_id in classifier.ids("Rome?")]


async def test_cohere_s_route_gives_each_type_of_vector(embedder: Serving) -> None:
    body = {"model": MODEL_ID, "texts": ["Rome", "a"], "input_type": "search_document", "embedding_types": ["float"]}
    answer = (await embedder.client.post("/v2/embed", json=body)).json()
    assert answer["embeddings"] == {"float": [wanted(embedder, "Rome"), wanted(embedder, "a")]}
    assert answer["texts"] == ["Rome", "a"] and answer["meta"]["api_version"] == {"version": "2"}
    assert answer["meta"]["billed_units"] == {"input_tokens": len(embedder.ids("Rome")) + len(embedder.ids("a"))}
    content = [{"type": "text", "text": "Ro"}, {"type": "text", "text": "me"}]
    body = {"model": MODEL_ID, "inputs": [{"content": content}], "embedding_types": ["base64"]}
    answer = (await embedder.client.post("/v2/embed", json=body)).json()
    [text] = answer["embeddings"]["base64"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == wanted(embedder, "Rome")


def test_cohere_s_bits_are_the_signs_of_the_values() -> None:
    vectors = np.array([[1, -1, 0, -1, -1, -1, -1, 1] * 2, [-1] * 8 + [1] * 8], np.float32)
    assert [vector.tolist() for vector in typed(vectors, "ubinary")] == [[161, 161], [0, 255]]
    assert [vector.tolist() for vector in typed(vectors, "binary")] == [[33, 33], [-128, 127]]


def test_cohere_s_types_of_texts_choose_the_model_s_prompt() -> None:
    body = {"model": MODEL_ID, "texts": ["x"], "truncate": "START", "max_tokens": 3}
    prompts = {"query": "q: ", "passage": "p: ", "special": "s: "}
    for input_type, name in {"search_query": "query", "search_document": "passage", "special": "special"}.items():
        assert (
            CohereEmbedRequest.read({**body, "input_type": input_type}).translated(prompts).body["prompt_name"] == name
        )
    made = CohereEmbedRequest.read({**body, "input_type": "clustering"}).translated(prompts).body
    assert made["prompt_name"] is None
    assert (made["truncate_prompt_tokens"], made["truncation_side"]) == (3, "left")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"images": ["data:"]}, 422, "images"),
        ({"embedding_types": ["int8"]}, 422, "embedding_types"),
        ({"embedding_types": ["bits"]}, 400, "embedding_types"),
        ({"embedding_types": ["binary"]}, 400, "embedding_types"),
        ({"input_type": "poem"}, 400, "input_type"),
        ({"truncate": "MIDDLE"}, 400, "truncate"),
        ({"truncate": "NONE", "max_tokens": 3}, 422, "max_tokens"),
        ({"output_dimension": 9}, 400, "output_dimension"),
        ({"input": "x"}, 422, "input"),
        ({"texts": []}, 400, "texts"),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, 422, "inputs[0].content[0]"),
    ],
)
async def test_what_cohere_s_route_does_not_do_is_rejected_with_an_error(
    embedder: Serving, fields: dict[str, Any], status: int, param: str
) -> None:
    response = await embedder.client.post("/v2/embed", json={"model": MODEL_ID, "texts": ["x"], **fields})
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/pooling", {"task": "classify"}, "task", "embed or token_embed"),
        ("/pooling", {"task": 3}, "task", "embed or token_embed"),
        ("/pooling", {"use_activation": False}, "use_activation", "of models that classify"),
        ("/v1/embeddings", {"use_activation": False}, "use_activation", "of models that classify"),
        ("/v1/embeddings", {"normalize": False}, "normalize", "files decide"),
        ("/v1/embeddings", {"embed_dtype": "float16"}, "embed_dtype", "values are float32"),
    ],
)
async def test_what_an_embedder_does_not_do_is_rejected_with_an_error(
    embedder: Serving, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await embedder.client.post(path, json={"model": MODEL_ID, "input": "x", **fields})
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/pooling", {"task": "token_embed"}, "task"),
        ("/pooling", {"dimensions": 2}, "dimensions"),
        ("/classify", {"dimensions": 2}, "dimensions"),
        ("/classify", {"encoding_format": "base64"}, "encoding_format"),
    ],
)
async def test_what_a_classifier_does_not_do_is_rejected_with_an_error(
    classifier: Serving, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await classifier.client.post(path, json={"input": "x", **fields})
    assert response.status_code == 422, response.text
    assert response.json()["error"]["param"] == param


async def test_prompts_in_several_steps_have_no_vector_per_token(tmp_path: Path, anyio_backend: str) -> None:
    async with pooled(tmp_path, "embed", pooling="last", is_encoder=False, is_whole=False) as server:
        response = await server.client.post("/pooling", json={"input": "x", "task": "token_embed"})
        assert response.status_code == 422 and "in one step" in response.json()["error"]["message"]


async def test_other_servers_information_says_what_the_model_does(embedder: Serving) -> None:
    assert (await embedder.client.get("/server_info")).json()["is_embedding"] is True
    assert (await embedder.client.get("/model_info")).json()["is_generation"] is False


async def test_invocations_take_texts_for_vectors(embedder: Serving) -> None:
    """As in vLLM's container for SageMaker."""
    answer = (await embedder.client.post("/invocations", json={"input": "Rome?"})).json()
    assert answer["data"][0]["embedding"] == wanted(embedder, "Rome?")

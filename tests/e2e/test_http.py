"""HTTP on a real server: launcher, router and shard as processes."""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e import tiny_server_model
from tests.e2e.launched import Launched


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    model = tiny_server_model.make(tmp_path_factory.mktemp("model"))
    arguments = ("--model-id", str(model), "--cpu-memory", "64MiB", "--threads", "1")
    with Launched(*arguments) as started:
        yield started.wait_until_ready()


@pytest.mark.long
def test_routes_agree_on_the_text(server: Launched) -> None:
    """One greedy text, whole and streamed, on LoRAX's and on OpenAI's routes."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        inputs = "one two three"
        parameters = {"max_new_tokens": 20, "ignore_eos_token": True, "details": True}
        whole = client.post("/generate", json={"inputs": inputs, "parameters": parameters}).json()
        [listed] = client.post("/", json={"inputs": inputs, "parameters": parameters}).json()
        assert listed == whole
        stream = client.post("/generate_stream", json={"inputs": inputs, "parameters": parameters}).text
        assert len(stream.split("\n\n")) == 21
        body = {"model": "", "prompt": inputs, "max_tokens": 20, "temperature": 0, "ignore_eos_token": True}
        completion = client.post("/v1/completions", json=body).json()
        text = completion["choices"][0]["text"]
        assert text == whole["generated_text"]
        sampled = {"inputs": inputs, "parameters": {**parameters, "do_sample": True, "seed": 7}}
        answers = [client.post("/generate", json=sampled).json()["generated_text"] for _ in range(2)]
        assert answers[0] == answers[1] != text

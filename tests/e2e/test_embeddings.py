"""Embedding models as real processes over HTTP."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModel, AutoTokenizer

from tests import tiny_pooled
from tests.e2e.launched import Launched

TEXTS = ["the quick brown fox", "a parrot repeats what the adapters say", "word for word", "the lazy dog " * 20]
EXACT = ("--cpu-memory", "128MiB", "--threads", "1", "--dtype", "float32")


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@torch.inference_mode()
def vectors(folder: Path, texts: list[str], pooling: str, normalize: bool) -> torch.Tensor:
    """[n, H]: each text alone in transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    found = []
    for text in texts:
        states = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found.append({"mean": states.mean(0), "last": states[-1]}[pooling])
    stacked = torch.stack(found)
    return torch.nn.functional.normalize(stacked, dim=-1) if normalize else stacked


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_openai_client_gets_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny_pooled.make(name, tmp_path / name, "embed" if name == "bert" else "generate")
    arguments = ["--model-id", str(folder), *EXACT]
    if name == "bert":
        tiny_pooled.sentence_transformer(folder)
    else:
        arguments += ["--pooling", "last"]
    wanted = vectors(folder, TEXTS, "mean" if name == "bert" else "last", normalize=name == "bert")
    with Launched(*arguments) as launched:
        launched.wait_until_ready()
        client = OpenAI(base_url=f"{launched.url}/v1", api_key="none")
        for encoding in ("float", "base64"):
            answer = client.embeddings.create(input=TEXTS, model=str(folder), encoding_format=encoding)
            if encoding == "float":
                found = torch.tensor([each.embedding for each in answer.data])
                assert float((found - wanted).abs().max()) <= 1e-5
        found = torch.tensor([each.embedding for each in client.embeddings.create(input=TEXTS, model="").data])
        assert float((found - wanted).abs().max()) <= 1e-5
        status, body = post(f"{launched.url}/embed", {"inputs": TEXTS[0]})
        assert status == 200 and torch.tensor(body["embeddings"]).equal(found[0])
        status, body = post(f"{launched.url}/v1/completions", {"model": "", "prompt": "hello"})
        assert status == 400 and "/v1/embeddings" in body["error"]["message"]
        status, body = post(f"{launched.url}/v1/embeddings", {"model": "", "input": "the fox " * 200})
        assert status == 413 and "truncate_prompt_tokens" in body["error"]["message"]
        body = {"model": "", "input": "the fox " * 200, "truncate_prompt_tokens": -1, "dimensions": 16}
        status, body = post(f"{launched.url}/v1/embeddings", body)
        assert status == 200 and len(body["data"][0]["embedding"]) == 16
        with urllib.request.urlopen(f"{launched.url}/startup", timeout=60) as answer:
            assert answer.status == 200

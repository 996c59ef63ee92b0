"""Embedding models as real processes over HTTP."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from openai import OpenAI
from transformers import AutoModel, AutoTokenizer, pipeline

from tests import tiny_pooled
from tests.e2e.launched import Launched
from tests.shard.model.pooling.test_adapters import make_adapter

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


@pytest.mark.long
def test_the_demo_model_finds_a_function_by_what_it_does() -> None:
    functions = [
        "def size(items):\n    count = 0\n    for _ in items:\n        count += 1\n    return count\n",
        "def close(self):\n    if self._file is not None:\n        self._file.close()\n        self._file = None\n",
        "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
    ]
    with Launched("--pooling", "mean", "--cpu-memory", "128MiB", "--threads", "1") as launched:
        launched.wait_until_ready()
        body = {"model": "search", "input": ["Close the file", *functions]}
        status, answer = post(f"{launched.url}/v1/embeddings", body)
        assert status == 200, answer
        found = torch.nn.functional.normalize(torch.tensor([each["embedding"] for each in answer["data"]]), dim=-1)
        assert int((found[1:] @ found[0]).argmax()) == 1
        bare = post(f"{launched.url}/v1/embeddings", {**body, "model": ""})[1]["data"][0]["embedding"]
        assert bare != answer["data"][0]["embedding"]


@pytest.mark.long
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
        if name == "bert":
            check_every_token(launched.url, folder)
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


@torch.inference_mode()
def check_every_token(url: str, folder: Path) -> None:
    """Compares every token's vector from `/pooling` with the hidden states of transformers, normalised."""
    status, body = post(f"{url}/pooling", {"input": TEXTS[:2], "task": "token_embed"})
    assert status == 200, body
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=torch.float32)
    for text, each in zip(TEXTS, body["data"], strict=False):
        states = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        want = torch.nn.functional.normalize(states, dim=-1)
        assert float((torch.tensor(each["data"]) - want).abs().max()) <= 1e-5


@torch.inference_mode()
def logits(base: Path, adapter: Path | None, task: str, *texts: str) -> torch.Tensor:
    """[tokens or 1, size] of a text or a pair of texts, in transformers and PEFT."""
    model: Any = tiny_pooled.CLASSES[task].from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    encoded = AutoTokenizer.from_pretrained(base)(*texts, return_tensors="pt")
    output = model.eval()(**encoded)
    if task == "embed":
        found: torch.Tensor = output.last_hidden_state[0].mean(0, keepdim=True)
        return torch.nn.functional.normalize(found, dim=-1)
    scores: torch.Tensor = output.logits[0]
    return scores.view(-1, scores.shape[-1])


@pytest.mark.long
def test_sixteen_requests_under_several_adapters_equal_peft(tmp_path: Path) -> None:
    base = tiny_pooled.sentence_transformer(tiny_pooled.make("bert", tmp_path / "bert"))
    roots = tmp_path / "roots"
    for seed, name in enumerate(("a", "b", "c")):
        make_adapter(roots / name, base, "embed", "FEATURE_EXTRACTION", ["query", "value", "dense"], seed)
    texts = [" ".join(TEXTS[0].split() * (1 + index % 5)) for index in range(16)]
    adapters = [("", "a", "b", "c")[index % 4] for index in range(16)]
    wanted = [
        logits(base, roots / name if name else None, "embed", text)[0]
        for text, name in zip(texts, adapters, strict=True)
    ]
    with Launched("--model-id", str(base), *EXACT, "--local-adapter-root", str(roots)) as launched:
        launched.wait_until_ready()

        def ask(index: int) -> torch.Tensor:
            body = {"model": adapters[index], "adapter_source": "local", "input": texts[index]}
            status, answer = post(f"{launched.url}/v1/embeddings", body)
            assert status == 200, answer
            return torch.tensor(answer["data"][0]["embedding"])

        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, range(16)))
        for found, want in zip(together, wanted, strict=True):
            assert float((found - want).abs().max()) <= 1e-5
        assert float((wanted[1] - wanted[5]).abs().max()) > 1e-3
        for index in (0, 1, 7):
            assert torch.equal(ask(index), together[index])


@pytest.mark.long
def test_pairs_are_scored_and_ranked_by_a_cross_encoder(tmp_path: Path) -> None:
    base = tiny_pooled.make("bert", tmp_path / "bert", "classify", num_labels=1)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    names = ["input_ids", "token_type_ids", "attention_mask"]
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "model_input_names": names}))
    roots = tmp_path / "roots"
    make_adapter(roots / "seq", base, "classify", "SEQ_CLS", ["query", "value"], seed=1)
    query, documents = TEXTS[0], TEXTS[1:]
    scores = [float(logits(base, None, "classify", query, text).sigmoid()) for text in documents]
    adapted = [float(logits(base, roots / "seq", "classify", query, text).sigmoid()) for text in documents]
    with Launched("--model-id", str(base), *EXACT, "--local-adapter-root", str(roots)) as launched:
        launched.wait_until_ready()
        for path in ("/score", "/v1/score"):
            status, answer = post(f"{launched.url}{path}", {"model": "", "text_1": query, "text_2": documents})
            assert status == 200, answer
            assert [each["score"] for each in answer["data"]] == pytest.approx(scores, abs=1e-5)
        body = {"model": "seq", "adapter_source": "local", "text_1": query, "text_2": documents}
        status, answer = post(f"{launched.url}/score", body)
        assert status == 200, answer
        assert [each["score"] for each in answer["data"]] == pytest.approx(adapted, abs=1e-5)
        assert adapted != pytest.approx(scores, abs=1e-3)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            status, answer = post(f"{launched.url}{path}", {"query": query, "documents": documents, "top_n": 2})
            assert status == 200, answer
            order = sorted(range(len(documents)), key=lambda index: -scores[index])
            assert [each["index"] for each in answer["results"]] == order[:2]
            assert answer["results"][0]["document"] == {"text": documents[order[0]]}
        status, answer = post(f"{launched.url}/classify", {"model": "", "input": documents})
        alone = [float(logits(base, None, "classify", text).sigmoid()) for text in documents]
        assert [each["probs"] for each in answer["data"]] == [pytest.approx([score], abs=1e-5) for score in alone]
        status, answer = post(f"{launched.url}/pooling", {"model": "", "input": documents[0], "use_activation": False})
        assert answer["data"][0]["data"] == pytest.approx(
            logits(base, None, "classify", documents[0])[0].tolist(), abs=1e-5
        )
        status, answer = post(f"{launched.url}/v1/embeddings", {"model": "", "input": "hi"})
        assert status == 400 and answer["error"]["code"] == "wrong_task"


@pytest.mark.long
def test_entities_are_those_of_transformers(tmp_path: Path) -> None:
    labels = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}
    base = tiny_pooled.make("distilbert", tmp_path / "base", "token-classify", id2label=labels)
    roots = tmp_path / "roots"
    make_adapter(roots / "tok", base, "token-classify", "TOKEN_CLS", ["q_lin", "v_lin"], seed=1)
    recogniser = pipeline(
        "token-classification", model=str(base), tokenizer=str(base), aggregation_strategy="simple", device="cpu"
    )
    texts = ["Angela Smith says the fox jumps over Berlin", "word for word, Paris"]
    wanted = [
        [
            {"entity_group": each["entity_group"], "start": each["start"], "end": each["end"],
             "word": text[each["start"] : each["end"]].lower(), "score": pytest.approx(float(each["score"]), abs=1e-5)}
            for each in recogniser(text)
        ]
        for text in texts
    ]  # fmt: skip
    assert all(wanted)
    with Launched("--model-id", str(base), *EXACT, "--local-adapter-root", str(roots)) as launched:
        launched.wait_until_ready()
        assert post(f"{launched.url}/classify", {"inputs": texts[0]}) == (200, wanted[0])
        assert post(f"{launched.url}/classify_batch", {"inputs": texts}) == (200, wanted)
        status, answer = post(f"{launched.url}/pooling", {"input": texts[0], "use_activation": False})
        assert status == 200
        found = torch.tensor(answer["data"][0]["data"])
        assert float((found - logits(base, None, "token-classify", texts[0])).abs().max()) <= 1e-5
        body = {"model": "tok", "adapter_source": "local", "input": texts[0], "use_activation": False}
        status, answer = post(f"{launched.url}/pooling", body)
        assert status == 200, answer
        found = torch.tensor(answer["data"][0]["data"])
        assert float((found - logits(base, roots / "tok", "token-classify", texts[0])).abs().max()) <= 1e-5

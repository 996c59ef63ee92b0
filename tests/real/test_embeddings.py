"""MiniLM over HTTP: the vectors of transformers, pooled and normalised as its sentence-transformers files say."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.real import families, likelihood

pytestmark = pytest.mark.real

MAX_LENGTH = 256
"""Tokens of a text, by the model's sentence_bert_config.json."""
PROSE = likelihood.TEXT.read_text()
TEXTS = [
    "A",
    "The ferry left the north quay at six in the morning.",
    "A boat departed early from the harbour.",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002\u4eba\u53e3\u306f\u591a\u3044\u3002",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \U0001f600 caf\u00e9 na\u00efve",
    "def size(items):\n    return sum(1 for _ in items)\n",
    PROSE[:900],
]
TOO_LONG = PROSE[:4000]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with families.serving(families.minilm(), tmp_path_factory.mktemp("minilm"), max_total_tokens=MAX_LENGTH) as served:
        yield served


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """[texts, H] of transformers, each text alone; TOO_LONG, the last one, is cut."""
    tokenizer: Any = AutoTokenizer.from_pretrained(families.minilm())
    network = AutoModel.from_pretrained(families.minilm(), dtype=torch.float32).eval()
    vectors = []
    for text in (*TEXTS, TOO_LONG):
        encoded = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(network(**encoded).last_hidden_state[0].mean(0))
    assert len(tokenizer(TEXTS[-1]).input_ids) > MAX_LENGTH // 2
    assert len(tokenizer(TOO_LONG).input_ids) > MAX_LENGTH
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


def vectors_of(url: str, **body: Any) -> torch.Tensor:
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "", **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    return torch.tensor([item["embedding"] for item in answer.json()["data"]])


def test_vectors_are_those_of_transformers(url: str, expected: torch.Tensor) -> None:
    """Of texts in one request, and of a text that is too long unless it is cut."""
    vectors = torch.cat((vectors_of(url, input=TEXTS), vectors_of(url, input=TOO_LONG, truncate_prompt_tokens=-1)))
    assert float((vectors - expected).abs().max()) <= 1e-5
    assert float((vectors * expected).sum(-1).min()) >= 1 - 1e-6
    similarities = expected @ expected.T
    assert float(similarities[1, 2]) > float(similarities[1, 3])  # so the network is a trained one


def test_a_text_that_is_too_long_is_refused(url: str) -> None:
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "", "input": TOO_LONG}, timeout=300)
    assert answer.status_code == 413
    assert "truncate_prompt_tokens" in answer.json()["error"]["message"]

"""sentence-transformers' evaluators: the same scores of a model in this process and behind /v1/embeddings."""

import os
import random
from typing import Any

import numpy as np
import requests
import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import evaluation

NUM_TEXTS, NUM_QUERIES = 120, 30
WORDS = "the quick brown fox jumps over a lazy dog parrot repeats what adapters say".split()  # noqa: SIM905


class Served(SentenceTransformer):
    """Gets its vectors from the server."""

    def encode(self, inputs: Any, *, convert_to_tensor: bool = False, **options: Any) -> Any:
        assert options.get("precision") in (None, "float32") and not options.get("prompt")
        assert not options.get("normalize_embeddings") and options.get("truncate_dim") is None
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        answer = requests.post(
            os.environ["URL"] + "/v1/embeddings",
            json={"model": os.environ["MODEL"], "input": texts, "truncate_prompt_tokens": -1},
            headers={"authorization": f"Bearer {os.environ['KEY']}"},
            timeout=120,
        )
        answer.raise_for_status()
        vectors = np.array([each["embedding"] for each in answer.json()["data"]], np.float32)
        vectors = vectors[0] if isinstance(inputs, str) else vectors
        if convert_to_tensor:
            return torch.from_numpy(vectors)
        return vectors if options.get("convert_to_numpy", True) else list(torch.from_numpy(vectors))


drawn = random.Random(1)
texts = [" ".join(drawn.choices(WORDS, k=drawn.randint(1, 60))) for _ in range(NUM_TEXTS)]
queries = {f"q{index}": " ".join(texts[index].split()[::2]) for index in range(NUM_QUERIES)}
corpus = {f"d{index}": text for index, text in enumerate(texts)}
relevant = {f"q{index}": {f"d{index}", f"d{index + 1}"} for index in range(NUM_QUERIES)}
first, second, third = texts[:40], texts[40:80], texts[80:]
samples = [
    {"query": query, "positive": texts[index : index + 2], "negative": texts[index + 5 : index + 15]}
    for index, query in enumerate(queries.values())
]
labels = [index % 2 for index in range(40)]
folder = os.environ["BASE"]
local, served = SentenceTransformer(folder, device="cpu"), Served(folder, device="cpu")
evaluators = [
    evaluation.InformationRetrievalEvaluator(queries, corpus, relevant),
    evaluation.EmbeddingSimilarityEvaluator(first, second, [index / 40 for index in range(40)]),
    evaluation.BinaryClassificationEvaluator(first, second, labels),
    evaluation.TripletEvaluator(first, second, third),
    evaluation.RerankingEvaluator(samples),
    evaluation.TranslationEvaluator(first, second),
    evaluation.MSEEvaluator(first, second, teacher_model=local),
    evaluation.ParaphraseMiningEvaluator(corpus, [("d1", "d2"), ("d5", "d9")]),
]
for evaluator in evaluators:
    wanted, found = evaluator(local), evaluator(served)
    assert wanted.keys() == found.keys() and wanted
    different = {name: (wanted[name], found[name]) for name in wanted if not abs(wanted[name] - found[name]) <= 1e-4}
    assert not different, (type(evaluator).__name__, different)
    print(type(evaluator).__name__, len(found), "scores")
print("sentence-transformers", sentence_transformers.__version__)

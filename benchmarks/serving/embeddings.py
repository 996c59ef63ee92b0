"""Texts per second of an embedding model over HTTP, next to sentence-transformers in one process at its best batch size
and to infinity over HTTP, in alternating rounds.

The model is a random BERT of the size of all-MiniLM-L6-v2; texts have 4 to 200 words. sentence-transformers sorts them
by length itself; the first round tries all batch sizes, and the later ones the best of them. All compute in float32 on
all cores. `python -m benchmarks.load.peers install-embedders` installs both.
"""

import json
import os
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel

from benchmarks.evidence.figure import Case, Cases, Raw
from benchmarks.load import peers
from benchmarks.load.rounds import OURS
from benchmarks.load.servers import RunningServer, lorikeet, running

SENTENCE_TRANSFORMERS, INFINITY = "sentence-transformers", "infinity"
ROUNDS, NUM_TEXTS, WORDS = 5, 800, (4, 200)
BATCH_SIZES = (8, 16, 32, 64, 128)
"""Batch sizes of sentence-transformers."""
CLIENTS, TEXTS_PER_REQUEST = 8, 32
"""Clients of a server, and texts of each request."""
SEED = 20261124
SHAPE = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PEER = """
import json, sys, time
from sentence_transformers import SentenceTransformer
folder, texts, sizes = json.load(sys.stdin)
texts = json.load(open(texts))
model = SentenceTransformer(folder, device="cpu")
model.encode(texts[:64], batch_size=32)
found = {}
for size in sizes:
    start = time.perf_counter()
    model.encode(texts, batch_size=size)
    found[size] = len(texts) / (time.perf_counter() - start)
print(json.dumps(found))
"""


def make_texts(number: int) -> list[str]:
    """Random words, with as many of them as people's texts have: most short, some long."""
    drawn = random.Random(SEED)
    words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(3000)]
    low, high = WORDS
    lengths = (min(high, low + int(drawn.expovariate(1 / 40))) for _ in range(number))
    return [" ".join(drawn.choices(words, k=length)) for length in lengths]


def make_model(folder: Path, texts: Sequence[str]) -> Path:
    """A random BERT with a WordPiece tokenizer, mean pooling and normalisation."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=8000, special_tokens=list(SPECIAL), show_progress=False)
    )
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))  # which older versions of transformers read too
    torch.manual_seed(SEED)
    BertModel(BertConfig(vocab_size=core.get_vocab_size(), **SHAPE)).save_pretrained(folder)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SHAPE["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def served(server: RunningServer, path: str, model: str, texts: Sequence[str]) -> float:
    """Texts per second of some clients that each send one request after the other."""
    parts = [texts[first : first + TEXTS_PER_REQUEST] for first in range(0, len(texts), TEXTS_PER_REQUEST)]
    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        num_vectors = sum(pool.map(partial(_ask, f"http://127.0.0.1:{server.port}{path}", model), parts))
    assert num_vectors == len(texts)
    return len(texts) / (time.perf_counter() - start)


def _ask(url: str, model: str, texts: Sequence[str]) -> int:
    body = json.dumps({"model": model, "input": list(texts), "encoding_format": "base64"}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return len(json.load(answer)["data"])


def in_process(folder: Path, texts: Path, sizes: Sequence[int]) -> dict[str, float]:
    """Texts per second of sentence-transformers by batch size."""
    request = json.dumps([str(folder), str(texts), list(sizes)])
    command = [str(peers.sentence_transformers_python()), "-c", PEER]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, input=request, check=True, capture_output=True, text=True, env=environment)
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def measure(num_rounds: int = ROUNDS, num_texts: int = NUM_TEXTS) -> Cases:
    """Texts per second of each system; of sentence-transformers by batch size."""
    texts = make_texts(num_texts)
    sizes: Sequence[int] = BATCH_SIZES
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder, file = make_model(Path(name, "model"), texts), Path(name, "texts.json")
        file.write_text(json.dumps(texts))
        ours = servers.enter_context(running("embeddings", lorikeet(folder)))
        other = servers.enter_context(running(INFINITY, peers.infinity(folder)))
        for number in range(num_rounds):
            with other.frozen():
                served(ours, "/v1/embeddings", "", texts[: num_texts // 8])
                rate = served(ours, "/v1/embeddings", "", texts)
            with ours.frozen():
                served(other, "/embeddings", "peer", texts[: num_texts // 8])
                rate_of_infinity = served(other, "/embeddings", "peer", texts)
            with ours.frozen(), other.frozen():
                rates = in_process(folder, file, sizes)
            best = max(rates, key=lambda size: rates[size])
            sizes = [int(best)]
            yield Case(f"round {number}", {OURS: rate, INFINITY: rate_of_infinity, SENTENCE_TRANSFORMERS: rates})


def over_sentence_transformers(raw: Raw) -> float:
    """Times sentence-transformers at its best batch size."""
    return float(raw[OURS] / max(raw[SENTENCE_TRANSFORMERS].values()))


def over_infinity(raw: Raw) -> float:
    """Times infinity."""
    return float(raw[OURS] / raw[INFINITY])

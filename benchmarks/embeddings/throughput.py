"""Texts per second of an embedding model over HTTP, next to sentence-transformers in one process at its best batch size
and, where it is installed, next to infinity over HTTP; in alternating rounds.

The model is a random BERT of the size of all-MiniLM-L6-v2; texts have 4 to 200 words. sentence-transformers sorts them
by length itself. All compute in float32 on all cores.

    python -m benchmarks.embeddings.throughput --peer PYTHON [--infinity COMMAND] [--rounds N] [--quick]

PYTHON is that of a virtual environment with sentence-transformers, COMMAND infinity's `infinity_emb`.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from benchmarks.evidence import arguments
from benchmarks.load.servers import Command, Server, lorikeet, running

ROUNDS, NUM_TEXTS, WORDS = 5, 2000, (4, 200)
BATCH_SIZES = (8, 16, 32, 64, 128)
"""Of sentence-transformers; the best one counts."""
CLIENTS, TEXTS_PER_REQUEST = 8, 32
"""Of the servers."""
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
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=512, **names).save_pretrained(folder)
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


def served(server: Server, path: str, model: str, texts: Sequence[str]) -> float:
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


def in_process(python: str, folder: Path, texts: Path, sizes: Sequence[int]) -> dict[str, float]:
    """Texts per second of sentence-transformers by batch size."""
    asked = json.dumps([str(folder), str(texts), list(sizes)])
    output = subprocess.run([python, "-c", PEER], input=asked, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def infinity(command: str, folder: Path) -> Command:
    """Its server on CPU in float32, with its own batching."""
    flags = ("v2", "--model-id", str(folder), "--served-model-name", "peer", "--device", "cpu", "--dtype", "float32")
    return Command((command, *flags, "--no-bettertransformer", "--port", "{port}"), {"HF_HUB_OFFLINE": "1"})


def measure(peer: str, infinity_command: str, num_rounds: int, num_texts: int) -> dict[str, Any]:
    """Texts per second of each round; of sentence-transformers at its best batch size of that round."""
    texts = make_texts(num_texts)
    found: dict[str, list[float]] = {"lorikeet": [], "sentence-transformers": [], "infinity": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder, file = make_model(Path(name, "model"), texts), Path(name, "texts.json")
        file.write_text(json.dumps(texts))
        ours = servers.enter_context(running("embeddings", lorikeet(folder)))
        other = (
            servers.enter_context(running("infinity", infinity(infinity_command, folder))) if infinity_command else None
        )
        for _ in range(num_rounds):
            if other is None:
                found["lorikeet"].append(served(ours, "/v1/embeddings", "", texts))
            else:
                with other.frozen():
                    found["lorikeet"].append(served(ours, "/v1/embeddings", "", texts))
                with ours.frozen():
                    found["infinity"].append(served(other, "/embeddings", "peer", texts))
            if peer:
                with ExitStack() as frozen:
                    for server in filter(None, (ours, other)):
                        frozen.enter_context(server.frozen())
                    found["sentence-transformers"].append(max(in_process(peer, folder, file, BATCH_SIZES).values()))
    return {name: values for name, values in found.items() if values}


def main() -> int:
    """Print texts per second, ratios, and one line of JSON."""
    parser = arguments.parser(__doc__, rounds=ROUNDS, quick=True)
    parser.add_argument("--peer", default="", help="Python of an environment with sentence-transformers")
    parser.add_argument("--infinity", default="", help="infinity's command")
    given = parser.parse_args()
    rounds, num_texts = (1, 64) if given.quick else (given.rounds, NUM_TEXTS)
    found = measure(given.peer, given.infinity, rounds, num_texts)
    for name, values in found.items():
        ratio = statistics.median(ours / other for ours, other in zip(found["lorikeet"], values, strict=True))
        print(f"{name}: {statistics.median(values):.1f} texts/s, lorikeet over it {ratio:.2f} x")
    print(json.dumps({"texts_per_s": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

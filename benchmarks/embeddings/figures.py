"""The figures of embedding models."""

from benchmarks.embeddings import throughput
from benchmarks.evidence.figure import Figure, Suite
from benchmarks.load.peers import INFINITY_VERSION, SENTENCE_TRANSFORMERS_VERSION

SUITES: tuple[Suite, ...] = (
    Suite("embeddings-throughput", throughput.measure, throughput.ROUNDS,
          (Figure("embeddings over sentence-transformers at its best batch size", throughput.over_sentence_transformers,
                  1.3, unit="×"),
           Figure("embeddings over infinity, 8 clients", throughput.over_infinity, 1.0, unit="×")),
          "random BERT, 13 M", "float32",
          f"sentence-transformers {SENTENCE_TRANSFORMERS_VERSION}, infinity {INFINITY_VERSION}"),
)  # fmt: skip

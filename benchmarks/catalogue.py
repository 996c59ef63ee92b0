"""All suites of figures that are published. Each folder defines its own next to its benchmarks."""

from benchmarks.adapters import figures as adapters
from benchmarks.embeddings import figures as embeddings
from benchmarks.evidence.figure import Suite
from benchmarks.grammar import figures as grammar
from benchmarks.llama_cpp import figures as llama_cpp
from benchmarks.quantization import figures as quantization
from benchmarks.recovery import figures as recovery
from benchmarks.router import figures as router
from benchmarks.serving import figures as serving
from benchmarks.speculation import figures as speculation

SUITES: tuple[Suite, ...] = (
    *serving.SUITES, *router.SUITES, *adapters.SUITES, *speculation.SUITES, *recovery.SUITES, *grammar.SUITES,
    *embeddings.SUITES, *quantization.SUITES, *llama_cpp.SUITES,
)  # fmt: skip

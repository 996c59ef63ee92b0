"""64 adapters whose requests have zipf's frequencies, on a server with 16 slots: the run that docs/bench.md shows.

Writes the printed block and the plots into docs/images/zipf.

    python -m benchmarks.adapters.zipf [--quick]
"""

import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evidence import arguments
from benchmarks.load import adapted
from benchmarks.load.servers import REPOSITORY
from lorikeet.launcher.bench.main import main as bench

NAMES = tuple(f"attention-{number:02}" for number in range(64))
SLOTS = 16
MODEL = "random Llama, 200 M, bfloat16"
FOLDER = REPOSITORY / "docs" / "images" / "zipf"
LOAD = ("--num-prompts", "300", "--max-concurrency", "16", "--input-len", "uniform:32-128", "--output-len", "32")
QUICK = ("--num-prompts", "40", "--max-concurrency", "4", "--input-len", "16", "--output-len", "4")


def run(base: adapted.Base, load: Sequence[str], folder: Path) -> str:
    """Serve and load; returns the printed block. Raises RuntimeError where requests failed."""
    from benchmarks.models import adapter_files  # torch

    adapter_files.make(base.model, base.root, list(NAMES))
    with adapted.serving("zipf", base, "--max-active-adapters", str(SLOTS)) as server:
        words = ["run", "--url", f"http://127.0.0.1:{server.port}", "--api", "lorax", "--adapters", ",".join(NAMES)]
        words += ["--zipf-exponent", "1", "--no-progress", "--svg", str(folder), *load]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = bench(words)
    if code:
        raise RuntimeError("requests failed")
    return printed.getvalue()


if __name__ == "__main__":
    if arguments.parser(__doc__, quick=True).parse_args().quick:
        with tempfile.TemporaryDirectory() as name:
            print(run(adapted.small(), QUICK, Path(name)))
    else:
        block = run(adapted.full(), LOAD, FOLDER)
        (FOLDER / "block.txt").write_text(f"{MODEL}, {SLOTS} slots, {len(NAMES)} adapters\n{block}")
        print(block)

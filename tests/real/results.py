"""The table of number formats in docs/quantization.md: tests of tests/real write its rows, this module renders it.

make test-real REAL_RESULTS=tests/real/results.json     # writes the rows of the tests that run
python -m tests.real.results                            # writes the table; in `make docs`
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- likelihoods:begin -->", "<!-- likelihoods:end -->"
STORED = Path(__file__).with_name("results.json")
ORDER = (
    "float32", "bfloat16", "float16", "`int8`", "`int4`", "`int4-g32`", "`.gguf` ", "`bitsandbytes`", "`bitsandbytes-",
    "`gptq`", "`awq`", "`hqq", "`fp8`",
)  # fmt: skip
"""Beginnings of the formats' names, in the table's order."""


class Result(Protocol):
    """What a model gave: its mean negative log likelihood, and the bytes of its tensors."""

    @property
    def mean(self) -> float: ...

    @property
    def num_bytes(self) -> int: ...


def record(format: str, computed: str, result: Result, reference: float, of_values: float | None = None) -> None:
    """Write a row, if REAL_RESULTS names a file. `computed`: what is multiplied by what. `reference`: the mean of the
    plain weights in float32; `of_values`: of the format's own values in float32.
    """
    path = os.environ.get("REAL_RESULTS")
    if not path:
        return
    row = {
        "computed": computed, "likelihood": round(result.mean, 4), "to_reference": round(result.mean - reference, 4),
        "to_values": None if of_values is None else round(result.mean - of_values, 4), "bytes": result.num_bytes,
    }  # fmt: skip
    with Path(path).open("a+") as file:  # other processes write too
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = json.loads(file.read() or "{}") | {format: row}
        file.truncate(0)
        file.write(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def table() -> str:
    """The rows of STORED in Markdown."""
    rows = json.loads(STORED.read_text())

    def place(format: str) -> tuple[int, str]:
        return next((index for index, begin in enumerate(ORDER) if format.startswith(begin)), len(ORDER)), format

    lines = [
        "| format | computed as | likelihood | over float32 | over its own values | memory |",
        "|---|---|---|---|---|---|",
    ]
    for format in sorted(rows, key=place):
        row = rows[format]
        own = "" if row["to_values"] is None else f"{row['to_values']:+.4f}"
        cells = (format, row["computed"], f"{row['likelihood']:.4f}", f"{row['to_reference']:+.4f}", own)
        lines.append(f"| {' | '.join(cells)} | {row['bytes'] / 1e6:.0f} MB |")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The document with the table between its marks."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text()))

"""What compiled kernels take on each architecture: the committed results, their limits, and the table in the docs.

python -m tests.cuda.kernel_table > docs/cuda-kernels.md
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("kernel_resources.jsonl")
MOST_SPILT = 256
"""Bytes that a thread may spill to local memory."""
KIB = 1024
SHARED = {75: (64, 64), 80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
"""KiB of shared memory of one program at most, and of a multiprocessor (CUDA Programming Guide)."""
RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that each program takes in addition to its own, from 8.0 on."""
REGISTERS, WARP = 65536, 32
SHOWN = (
    "attend", "shrink", "expand", "head_logits", "multiply", "multiply_integers", "multiply_8bit", "multiply_4bit",
    "resolve",
)  # fmt: skip
"""Kernels in the documentation: the others take little."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes."""

    variant: str
    kernel: str
    architecture: int
    registers: int
    """Registers of a thread."""
    spilt: int
    """Bytes of local memory of a thread."""
    shared: int
    """Bytes of shared memory of a program."""
    warps: int
    launches: str
    """`fingerprint` of the variant's launches of this kernel."""

    @property
    def programs(self) -> int:
        """Programs that run on a multiprocessor at once."""
        _, memory = SHARED[self.architecture]
        by_memory = memory * KIB // (self.shared + (RESERVED if self.architecture >= 80 else 0) or 1)
        return min(by_memory, REGISTERS // (self.registers * WARP * self.warps))

    @property
    def problem(self) -> str:
        """Which limit it exceeds; empty if none."""
        what = f"{self.kernel} of {self.variant} on sm_{self.architecture}"
        if self.shared > SHARED[self.architecture][0] * KIB:
            return f"{what} takes {self.shared} bytes of shared memory"
        if self.spilt > MOST_SPILT:
            return f"{what} spills {self.spilt} bytes"
        # a program of eight warps is as wide as two of four
        if self.kernel == "attend" and self.programs * self.warps < 8:
            return f"{what} leaves room for {self.programs} programs"
        return ""


def parse(lines: Iterable[str]) -> tuple[str, list[Resources]]:
    """The version of Triton, and what it compiled."""
    head, *rows = map(json.loads, lines)
    return head["triton"], [Resources(**row) for row in rows]


def document() -> str:
    """docs/cuda-kernels.md."""
    version, rows = parse(RESULTS.read_text().splitlines())
    lines = [
        "# Kernels by architecture",
        "",
        f"Compiled without a device with Triton {version}, which torch 2.13 for CUDA brings. Those of sm_90 have",
        "run on an H200 (docs/cuda.md), the others never.",
        "Each cell has the registers of a thread / KiB of shared memory / bytes spilt / programs on a",
        "multiprocessor. `tests/cuda/test_kernel_resources.py` holds the limits: no kernel exceeds the shared",
        f"memory, and none spills more than {MOST_SPILT} bytes. `tests/cuda/kernel_resources.jsonl` has all kernels.",
        "`python -m tests.cuda.kernel_table` writes this page.",
        "",
        "| kernel | " + " | ".join(f"sm_{each}" for each in SHARED) + " |",
        "|---|" + "---|" * len(SHARED),
    ]  # fmt: skip
    names = dict.fromkeys((row.kernel, row.variant) for row in rows if row.kernel in SHOWN)
    by_key = {(row.kernel, row.variant, row.architecture): row for row in rows}
    for kernel, variant in sorted(names, key=lambda name: (SHOWN.index(name[0]), name[1])):
        found = [by_key.get((kernel, variant, each)) for each in SHARED]
        lines.append(f"| `{kernel}`, {variant} | " + " | ".join(map(_cell, found)) + " |")
    return "\n".join(lines) + "\n"


def _cell(found: Resources | None) -> str:
    if found is None:
        return "–"
    return f"{found.registers} / {found.shared / KIB:.0f} / {found.spilt} / {found.programs}"


if __name__ == "__main__":
    print(document(), end="")

"""Products of few rows with one matrix on CPU, side by side in one process: weights in bfloat16 by our kernel and by
torch, the same with eight LoRAs of rank 16, and weights in 8 and 4 bits.

The matrices are those of a 200 M and an 8 B Llama. Each product is repeated over copies of its matrix that no cache
holds, as the matrices of a model are read one after the other. Prints medians of all rounds, times as multiples of our
bfloat16 product, and one line of JSON. With `--level` it runs as on a processor that has no more instructions.

    python -m benchmarks.kernels.products [--rounds N] [--level x86-64-v3] [--quick]
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.evidence import arguments

SHAPES = {
    "200 M, q k v": (1536, 1024), "200 M, gate": (2816, 1024), "200 M, down": (1024, 2816), "4096 × 1024": (4096, 1024),
    "8 B, q k v": (6144, 4096), "8 B, gate": (14336, 4096), "8 B, down": (4096, 14336),
}  # fmt: skip
"""Outputs and inputs."""
QUICK = {"tiny": (128, 256)}
ROWS = (1, 8, 32)
RANK, ADAPTERS = 16, 8
KINDS = ("bfloat16", "torch", "LoRA", "int8", "int4")
"""Our bfloat16 product comes first: times are multiples of its own."""
READ_BYTES = 2**28
"""Bytes of bfloat16 weights that all copies of a matrix have together."""
ROUNDS = 9
TOLERANCE = {"bfloat16": 0.01, "torch": 0.01, "LoRA": 0.01, "int8": 0.02, "int4": 0.15}
"""Root mean square of errors over that of results, of random weights."""
ONEDNN = {"x86-64-v2": "SSE41", "x86-64-v3": "AVX2", "x86-64-v4": "AVX512_CORE"}
TORCH = {"x86-64-v2": "default", "x86-64-v3": "avx2", "x86-64-v4": "avx512"}
"""What limits the libraries that torch multiplies with, by level."""

Multiply = Callable[[torch.Tensor], torch.Tensor]


def products(
    kind: str, weight: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], copies: int
) -> list[Multiply]:
    """The same product `copies` times, each with a copy of the weight. weight: [out, in]; factors: [RANK, in] and
    [RANK, out]; all bfloat16.
    """
    from lorikeet.shard.model.kernels.integer import PackedIntegers
    from lorikeet.shard.model.kernels.packing import StreamedMatrix
    from lorikeet.shard.model.quantization.integers import round_weight

    if kind == "torch":
        copied = [weight.clone() for _ in range(copies)]
        return [partial(torch.nn.functional.linear, weight=own) for own in copied]
    if kind == "bfloat16":
        return [StreamedMatrix(weight, None).project for _ in range(copies)]
    if kind == "LoRA":
        return [adapted(StreamedMatrix(weight, None).project, *factors) for _ in range(copies)]
    rounded = round_weight(weight, 8 if kind == "int8" else 4)
    packed = [PackedIntegers(rounded, None) for _ in range(copies)]
    return [partial(own.product, with_bias=False) for own in packed]


def adapted(multiply: Multiply, a: torch.Tensor, b: torch.Tensor) -> Multiply:
    """A product whose rows belong to ADAPTERS slots in turn, each with factors of its own in memory. a: [RANK, in];
    b: [RANK, out].
    """
    from lorikeet.shard.batch.inputs import StepInputs
    from lorikeet.shard.batch.row_groups import AdapterRows
    from lorikeet.shard.model.lora.targets import LoraTarget, Product, SlotWeights, adapt
    from tests.shard.model.lora.layout import packed

    target = LoraTarget("module", a.shape[1], b.shape[1], StepInputs(16, torch.device("cpu")))
    target.allocate(ADAPTERS)
    for slot in range(ADAPTERS):
        target.put(slot, packed(SlotWeights(a.clone(), b.clone())))
    # neighbours share a slot
    rows = {count: AdapterRows(range(ADAPTERS), [count // ADAPTERS] * ADAPTERS) for count in ROWS if count >= ADAPTERS}
    rows[1] = AdapterRows([0], [1])

    def call(x: torch.Tensor) -> torch.Tensor:
        y = multiply(x)
        adapt(rows[len(x)], Product(target, x, y))
        return y

    return call


@torch.inference_mode()
def compare(shape: tuple[int, int], rounds: int, read_bytes: int) -> dict[int, dict[str, float]]:
    """Median milliseconds of one product, by rows and kind. Raises RuntimeError for a wrong product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).bfloat16()
    inputs = {rows: torch.randn(rows, shape[1], generator=generator).bfloat16() for rows in ROWS}
    wanted = {rows: x.float() @ weight.float().t() for rows, x in inputs.items()}
    a, b = (torch.randn(RANK, size, generator=generator).bfloat16() / RANK for size in reversed(shape))
    changed = {rows: wanted[rows] + x.float() @ a.float().t() @ b.float() for rows, x in inputs.items()}
    made = {kind: products(kind, weight, (a, b), max(1, read_bytes // weight.nbytes)) for kind in KINDS}
    times: dict[int, dict[str, list[float]]] = {rows: {kind: [] for kind in KINDS} for rows in ROWS}
    for number in range(rounds + 1):  # the first one warms up
        for rows, x in inputs.items():
            for kind, calls in made.items():
                began = time.perf_counter()
                for call in calls:
                    y = call(x)
                if number:
                    times[rows][kind].append(1e3 * (time.perf_counter() - began) / len(calls))
                elif not (error := distance(y, changed[rows] if kind == "LoRA" else wanted[rows])) < TOLERANCE[kind]:
                    raise RuntimeError(f"{kind}, {rows} rows: errors are {error:.3f} of the results")
    return {rows: {kind: median(each) for kind, each in kinds.items()} for rows, kinds in times.items()}


def distance(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y - wanted).norm() / wanted.norm())


def limit(level: str) -> None:
    """Build our kernels for a level, and let oneDNN find that the processor has no more."""
    from lorikeet.shard.system import native, prebuilt

    torch.ops.mkldnn._is_mkldnn_bf16_supported()  # oneDNN reads its variable now
    (chosen,) = [each for each in prebuilt.LEVELS if each.name == level]
    flags: Any = (*prebuilt.COMMON_FLAGS, *chosen.flags, "-mtune=generic")
    native.FLAGS = flags


def main(given_arguments: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__, rounds=ROUNDS, quick=True)
    parser.add_argument("--level", choices=ONEDNN, help="instructions to do with")
    given = parser.parse_args(given_arguments)
    if given.level and os.environ.get("ONEDNN_MAX_CPU_ISA") != ONEDNN[given.level]:
        limits = {"ONEDNN_MAX_CPU_ISA": ONEDNN[given.level], "ATEN_CPU_CAPABILITY": TORCH[given.level]}
        again = ["--rounds", str(given.rounds), "--level", given.level, *(["--quick"] if given.quick else [])]
        command = [sys.executable, "-m", "benchmarks.kernels.products", *again]
        return subprocess.run(command, env=os.environ | limits, check=False).returncode
    if given.level:
        limit(given.level)
    header = "".join(f"{kind:>20}" for kind in KINDS)
    print(f"{torch.get_num_threads()} threads, {given.level or 'all instructions'}\n{'':<14} {'rows':>4}{header}")
    found = {}
    for name, shape in (QUICK if given.quick else SHAPES).items():
        found[name] = compare(shape, 1 if given.quick else given.rounds, 0 if given.quick else READ_BYTES)
        for rows, row in found[name].items():
            cells = "".join(f"{row[kind]:>10.3f} ms {row[kind] / row[KINDS[0]]:>5.2f} ×" for kind in KINDS)
            print(f"{name:<14} {rows:>4}{cells}", flush=True)
    print(json.dumps({"level": given.level, "milliseconds": found}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Compiles all kernels for every architecture, without a device, and prints as JSON lines what each takes.

python -m tests.cuda.compile_kernels [--only TEXT] [--architecture N] [--jobs N]

With the Triton that torch for CUDA pins, the sorted output is tests/cuda/kernel_resources.jsonl.
"""
# mypy: allow-untyped-calls

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lorikeet.shard.system import gpu
from tests.cuda.kernel_variants import VARIANTS, launches
from tests.cuda.launches import Launch, fingerprint

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


def capability_of(architecture: int) -> tuple[int, int]:
    return architecture // 10, architecture % 10


def compile_launch(kernel: Any, launch: Launch, architecture: int) -> dict[str, int]:
    """Registers of a thread, bytes of shared memory, bytes that are spilt, and warps."""
    places = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    constants = dict(launch.constants)
    source = ASTSource(kernel, dict(launch.signature), constants, places)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(launch.options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return {
        "registers": int(found[1]),
        "spilt": int(found[2]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
    }


def work(job: tuple[int, int]) -> list[dict[str, object]]:
    index, architecture = job
    variant = VARIANTS[index]
    with gpu.assumed(capability_of(architecture)):
        found, kernels = launches(variant)
    return [
        {"variant": variant.name, "kernel": launch.kernel, "architecture": architecture}
        | compile_launch(kernels[launch.kernel], launch, architecture)
        | {"launches": fingerprint({each for each in found if each.kernel == launch.kernel})}
        for launch in dict.fromkeys(found)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--architecture", type=int, action="append")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    jobs = [
        (index, architecture)
        for architecture in options.architecture or ARCHITECTURES
        for index, variant in enumerate(VARIANTS)
        if options.only in variant.name and variant.runs_on(capability_of(architecture))
    ]
    print(json.dumps({"triton": triton.__version__}), flush=True)
    with ProcessPoolExecutor(options.jobs) as pool:
        for rows in pool.map(work, jobs):
            for row in rows:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())

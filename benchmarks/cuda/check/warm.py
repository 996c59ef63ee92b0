"""Compiles what engines launch into Triton's cache, in parallel: in one process a first start takes a minute longer.

    TRITON_CACHE_DIR=FOLDER python -m benchmarks.cuda.check.warm [--architecture 90] [--jobs N] [--few]

It needs no card: what it writes serves one of that architecture with the same Triton.
"""
# mypy: allow-untyped-calls

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.cuda.check.rows import Row, Rows
from benchmarks.cuda.setup import LLAMA_1B, LLAMA_8B, Setup
from benchmarks.evidence import arguments

if TYPE_CHECKING:
    from tests.cuda.launches import Launch

LONGEST_FIRST = ("resolve", "attend")
MOST_ROWS, MOST_RUNNING = 512, 256
FEW = 2


def compile_kernels(rows: Rows, setup: Setup, is_brief: bool) -> None:
    rows.check("compile the kernels", lambda: _apart(setup))


def _apart(setup: Setup) -> Row:
    """In a process of its own, in which nothing is interpreted."""
    command = [sys.executable, "-m", "benchmarks.cuda.check.warm"]
    if setup.is_cuda:
        import torch

        major, minor = torch.cuda.get_device_capability(setup.device)
        command += ["--architecture", str(10 * major + minor)]
    else:
        command.append("--few")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines() or [""]
    return {"ok": ended.returncode == 0, "compiled": said[-1][:200]}


def collect(architecture: int, few: bool) -> tuple[list["Launch"], dict[str, Any]]:
    """What a start and the captured steps of both models launch, and every variant in the tests; and the kernels."""
    import torch

    from lorikeet.shard.batch.padding import Padding
    from lorikeet.shard.model import Model
    from lorikeet.shard.sampling import Sampler
    from lorikeet.shard.sampling.device import Tile
    from lorikeet.shard.system import gpu
    from tests.cuda import decode_step
    from tests.cuda.kernel_variants import VARIANTS, launches
    from tests.cuda.launches import recorded
    from tests.cuda.test_compiled_at_start import start

    def once(compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return compute

    capability = divmod(architecture, 10)
    found: dict[Launch, None] = {}
    kernels: dict[str, Any] = {}

    def of_model(model: Model, vocabulary: int) -> None:
        found.update(dict.fromkeys(start(model)))
        with recorded() as seen, torch.inference_mode():
            sampler = Sampler(vocabulary, MOST_RUNNING, decode_step.META, tile=Tile())
            sampler.warm_up()
            model.inputs.device_tokens, model.inputs.graph_sampling = sampler.device_tokens, sampler.in_graph
            padding = Padding(MOST_ROWS, decode_step.MOST_TOKENS, spare_page=0, has_adapters=True)
            model.capture(padding, once, padding.all())
        found.update(dict.fromkeys(seen.launches))
        kernels.update(seen.kernels)

    with gpu.assumed((capability[0], capability[1])):
        for shape in () if few else (LLAMA_8B, LLAMA_1B):
            with decode_step.without_values():
                of_model(decode_step.model_of(replace(shape, layers=1), has_adapters=True), shape.vocabulary)
        variants = [variant for variant in VARIANTS if variant.runs_on((capability[0], capability[1]))]
        for variant in variants[:FEW] if few else variants:
            launched, named = launches(variant)
            found.update(dict.fromkeys(launched))
            kernels.update(named)
    return list(found), kernels


LAUNCHES: list["Launch"] = []
KERNELS: dict[str, Any] = {}
"""Set before processes are forked, for functions of Triton cannot be sent to them."""


def _compile(job: tuple[int, int]) -> tuple[str, float]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    index, architecture = job
    launch, began = LAUNCHES[index], time.monotonic()
    places = {(at,): [["tt.divisibility", 16]] for at in launch.aligned}
    source = ASTSource(KERNELS[launch.kernel], dict(launch.signature), dict(launch.constants), places)
    triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(launch.options))
    return launch.kernel, time.monotonic() - began


def main(given: Sequence[str] | None = None) -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("--architecture", type=int, default=90, help="10 times the compute capability")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    parser.add_argument("--few", action="store_true", help="two variants alone, to test this")
    options = parser.parse_args(given)
    began = time.monotonic()
    LAUNCHES[:], kernels = collect(options.architecture, options.few)
    LAUNCHES[:] = [launch for launch in LAUNCHES if launch.kernel in kernels]
    KERNELS.update(kernels)
    order = sorted(range(len(LAUNCHES)), key=lambda index: LAUNCHES[index].kernel not in LONGEST_FIRST)
    with ProcessPoolExecutor(options.jobs) as pool:
        times = list(pool.map(_compile, [(index, options.architecture) for index in order]))
    name, longest = max(times, key=lambda time: time[1])
    total = sum(seconds for _, seconds in times)
    seconds = time.monotonic() - began
    print(f"{len(times)} kernels, {total:.0f} s of processor time in {seconds:.0f} s; longest {name} {longest:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the kernels that sample for Hopper, without a device, and checks the instructions. Run by test_triton.py."""

import re

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tests.cuda.kernel_variants import VARIANTS, launches
from tests.shard.model.medusa.compile_triton import registers


def check(name: str) -> None:
    """Compile the kernels of a variant, and look for atomic operations and spilt registers."""
    [variant] = [variant for variant in VARIANTS if variant.name == name]
    found, kernels = launches(variant)
    for launch in found:
        places = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
        source = ASTSource(kernels[launch.kernel], dict(launch.signature), dict(launch.constants), places)
        text = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options)).asm["ptx"]
        assert not re.search(r"atom\.|\tred\.", text), "an order that changes"
        spilt = re.search(r"(\d+) bytes spill stores", registers(text))
        assert spilt is not None and int(spilt[1]) <= 256, f"{launch.kernel}: registers ran out"


if __name__ == "__main__":
    for variant in ("sampling", "sampling in graphs"):
        check(variant)

"""The kernels for heads on devices: see triton_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestHeads(KernelsApart):
    cases = (Path(__file__).with_name("triton_cases.py"),)
    sample = (
        "(specification and 24 and not 1024 and (none or (distinct and not float32)))"
        " or (equal_bits and one and bfloat16) or equal_bounds"
    )
    compiles = "tests.shard.model.medusa.compile_triton"

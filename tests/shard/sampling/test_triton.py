"""The kernels that sample on devices: see triton_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestSampling(KernelsApart):
    cases = (Path(__file__).with_name("triton_cases.py"),)
    sample = "(specification and tight and 0) or (filters and roomy and 4 and (top_p or typical)) or not_finite"
    compiles = "tests.shard.sampling.compile_triton"

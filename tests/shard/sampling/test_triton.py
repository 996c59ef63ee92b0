"""The kernels that sample on devices: see triton_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestSampling(KernelsApart):
    cases = (Path(__file__).with_name("triton_cases.py"),)
    sample = (
        "(filters and 4 and (roomy and (top_p or typical) or tight and top_k)) or given_back or newest"
        " or grown or (graph and dtype1)"
    )
    compiles = "tests.shard.sampling.compile_triton"

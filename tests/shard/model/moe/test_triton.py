"""The kernels for experts on devices: see triton_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestExperts(KernelsApart):
    cases = (Path(__file__).with_name("triton_cases.py"),)
    sample = "(pairs_are_split and zipf) or (products and 144) or (specification and mixtral and (zipf or none))"
    compiles = "tests.shard.model.moe.compile_experts"

"""The kernel of masks: see triton_cases.py."""

from pathlib import Path

from tests.shard.apart import KernelsApart


class TestMasks(KernelsApart):
    cases = (Path(__file__).with_name("triton_cases.py"),)
    sample = "5000 and not float16"
    compiles = "tests.shard.grammar.compile_triton"
